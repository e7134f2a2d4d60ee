"""vLLM 0.8.5's connector over pdkv, in two processes, against its own classes over queues in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from with_torch.ports import free_ports
from with_torch.scenarios import SCENARIOS, in_queues
from with_torch.v0_end import FACES

pytestmark = [pytest.mark.torch, pytest.mark.vllm, pytest.mark.usefixtures("vllm")]

TESTS = Path(__file__).resolve().parents[1]


def two_processes(face, folder, *names):
    """Runs the scenarios with an end in each of two processes; returns what was said where one failed."""
    port = free_ports(2 * len(SCENARIOS))
    ends = [
        subprocess.Popen(
            [sys.executable, "-m", "with_torch.v0_end", face, role, str(port), str(folder), *names],
            cwd=TESTS,
            env=os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for role in ("kv_producer", "kv_consumer")
    ]
    try:
        said = [end.communicate(timeout=240)[0] for end in ends]
    finally:
        for end in ends:
            end.kill()
    return [text for end, text in zip(ends, said, strict=True) if end.returncode]


@pytest.mark.parametrize("face", FACES)
def test_two_processes_do_what_queues_do(face, tmp_path):
    failed = two_processes(face, tmp_path)
    assert not failed, "\n".join(failed)
    for name, scenario in SCENARIOS.items():
        caches, answers = torch.load(tmp_path / f"{name}.pt")
        theirs, their_answers = in_queues(scenario)
        assert all(map(torch.equal, caches, theirs)), name
        assert [bypass for _, bypass in answers] == [bypass for _, bypass in their_answers], name
        for (hidden, _), (their_hidden, _) in zip(answers, their_answers, strict=True):
            assert (hidden is None) == (their_hidden is None), name
            assert hidden is None or torch.equal(hidden, their_hidden), name
