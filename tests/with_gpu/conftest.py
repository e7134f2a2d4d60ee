"""Everything here needs a CUDA driver: a real one, or the stand-in that `make test-gpu` builds and names.

A process that has opened a driver keeps it, so these tests have a run of their own; others have nothing to collect.
"""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("PDKV_CUDA_LIBRARY") else ["test_*.py"]


@pytest.fixture
def pair():
    """Two engines of this process."""
    import pdkv

    with pdkv.Engine("one") as one, pdkv.Engine("other") as other:
        yield one, other


@pytest.fixture
def arena():
    """Memory of a GPU, filled and read by the driver's copies."""
    from gpu_check.dry_arena import DryArena

    return DryArena()
