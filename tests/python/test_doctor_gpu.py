"""`pdkv doctor` on GPUs: made-up drivers, and made-up ends of its trial."""

from __future__ import annotations

import pytest

from pdkv.doctor import choice, gpu
from pdkv.doctor.child import Outcome

NO_RDMA = {"nics": [], "rdma_ports": [], "rdma_reachable": False}


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def one(findings, subject):
    (found,) = [finding for finding in findings if finding.subject == subject]
    return found


def all_hinted(findings):
    return all(finding.hint for finding in findings if not finding.good)


GOOD, NO_TRIAL = {"good": True, "text": "works", "hint": None}, Outcome([])
H200 = {
    "ordinal": 0,
    "error": None,
    "name": "NVIDIA H200",
    "uuid": "00" * 16,
    "capability": "9.0",
    "isolated": None,
    "batched_copies": True,
    "kernels": {"good": True, "text": "kept in `a file`", "hint": None},
    "ipc": {"good": True, "text": "memory of cudaMalloc, by CUDA IPC", "hint": None},
    "pool": {"good": True, "text": "pools of pdkv, by file descriptor", "hint": None},
}
PLACES = [["named", False, "PDKV_CUDA_IMAGE is not set"], ["compiler", False, "no NVRTC"]]
ABSENT = Outcome(
    [{"present": False, "text": "no CUDA driver: libcuda.so.1 is not there", "gpus": [], "kernels": PLACES}]
)
MOVED_BY_GPU = Outcome([{"transport": "cuda", "good": True, "text": "moved 65536 bytes", "detail": "CUDA IPC"}])


def present(*gpus, text="CUDA 13.0, devices: 1"):
    return Outcome([{"present": True, "text": text, "gpus": list(gpus), "kernels": PLACES}])


def test_no_gpu_and_one_that_is_hidden(tmp_path):
    findings, facts = gpu.examine(tmp_path, ABSENT, NO_TRIAL)
    assert (findings[0].good, facts["cuda"], facts["gpus"], facts["devices"]) == (False, False, [], [])
    assert "no NVIDIA driver" in findings[0].text
    write(
        tmp_path,
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  580.1\nGCC version: 12\n",
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 5\n",
        },
    )
    findings, facts = gpu.examine(tmp_path, ABSENT, NO_TRIAL)
    assert "--gpus" in findings[0].hint
    assert facts["driver"] == "NVIDIA UNIX Open Kernel Module  580.1"
    assert facts["gpus"] == ["NVIDIA H200"]
    findings, _ = gpu.examine(tmp_path, Outcome([], "was killed by SIGSEGV"), NO_TRIAL)
    assert "was killed by SIGSEGV" in findings[0].text
    assert all_hinted(findings)


def test_a_gpu_that_works(tmp_path):
    findings, facts = gpu.examine(tmp_path, present(H200), MOVED_BY_GPU)
    assert all(finding.good for finding in findings), findings
    assert [finding.subject for finding in findings] == ["gpu", "cuda:0", "cuda:0 kernels", "cuda:0 memory", "cuda"]
    assert "compute capability 9.0" in one(findings, "cuda:0").text
    assert "by CUDA IPC; pools of pdkv" in one(findings, "cuda:0 memory").text
    assert facts["trial"]["detail"] == "CUDA IPC"


@pytest.mark.parametrize(
    ("change", "subject", "parts"),
    [
        ({"error": "out of memory", "hint": None}, "cuda:0", ["out of memory"]),
        ({"isolated": "`x` is a MIG instance"}, "cuda:0", ["MIG instance"]),
        (
            {"kernels": {"good": False, "text": "no compiler", "hint": None}},
            "cuda:0 kernels",
            ["no compiler", "compiler: no NVRTC"],
        ),
        (
            {"ipc": {"good": False, "text": "refused: 801", "hint": None}},
            "cuda:0 memory",
            ["but not all: refused: 801"],
        ),
        (
            {name: {"good": False, "text": f"no {name}", "hint": "ask"} for name in ("ipc", "pool")},
            "cuda:0 memory",
            ["no other process can map any: no ipc; no pool"],
        ),
    ],
)
def test_what_is_wrong_with_a_gpu_is_said(tmp_path, change, subject, parts):
    findings, _ = gpu.examine(tmp_path, present({**H200, **change}), MOVED_BY_GPU)
    finding = one(findings, subject)
    assert not finding.good
    assert all(part in finding.text for part in parts), finding.text
    assert all_hinted(findings)


def test_a_gpu_trial_that_fails_or_dies(tmp_path):
    refused = Outcome([{"transport": "cuda", "good": False, "text": "no peer access", "hint": None}])
    for trial, part in ((refused, "no peer access"), (Outcome([], "was killed by SIGSEGV", "words"), "SIGSEGV: words")):
        findings, _ = gpu.examine(tmp_path, present(H200), trial)
        assert not one(findings, "cuda").good
        assert part in one(findings, "cuda").text
        assert all_hinted(findings)


def test_an_old_driver_is_said_to_lack_batches(tmp_path):
    findings, _ = gpu.examine(tmp_path, present({**H200, "batched_copies": False}), MOVED_BY_GPU)
    assert "older than CUDA 12.8" in one(findings, "cuda:0").text


@pytest.mark.parametrize(
    ("trial", "transport", "part"),
    [
        ({"good": True, "detail": "CUDA IPC"}, "cuda", "on this host, CUDA IPC; between hosts `tcp`, through pinned"),
        ({"good": False}, None, "can't reach"),
        (None, None, "can't reach"),
    ],
)
def test_between_gpus(trial, transport, part):
    findings, choices = choice.examine([], NO_RDMA, {"chosen": None, "copies": []}, {"cuda": True, "trial": trial})
    assert choices[-1]["transport"] == transport
    assert part in findings[-1].text
    assert all_hinted(findings)
