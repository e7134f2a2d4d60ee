"""These tests are run by the environment that `make torch` makes; elsewhere there is nothing to collect."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = ["test_*.py"] if find_spec("torch") is None else []


@pytest.fixture(scope="session")
def vllm():
    """Makes vLLM 0.8.5's classes importable, in a process group of one rank, which its connector wants."""
    import torch

    from with_torch import vllm_classes

    vllm_classes.load()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
