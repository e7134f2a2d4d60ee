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
    "ways": {"good": True, "text": "between the host and it by a kernel", "hint": None},
    "ipc": {"good": True, "text": "memory of cudaMalloc, by CUDA IPC", "hint": None},
    "pool": {"good": True, "text": "pools of pdkv, by file descriptor", "hint": None},
    "dma_buf": True,
    "peer_memory": True,
    "unseen": None,
}
PLACES = [["named", False, "PDKV_CUDA_IMAGE is not set"], ["compiler", False, "no NVRTC"]]
ABSENT = Outcome(
    [{"present": False, "text": "no CUDA driver: libcuda.so.1 is not there", "gpus": [], "kernels": PLACES}]
)
MOVED = {"transport": "cuda", "good": True, "text": "moved 65536 bytes", "detail": "CUDA IPC"}
TRIED = {"kernels": 0, "good": True, "text": "25 kernels left the right bytes", "hint": None}
MOVED_BY_GPU = Outcome([MOVED, TRIED])


def present(*gpus, text="CUDA 13.0, devices: 1"):
    return Outcome([{"present": True, "text": text, "gpus": list(gpus), "kernels": PLACES}])


def test_no_gpu_and_one_that_is_hidden(tmp_path):
    findings, facts = gpu.examine(tmp_path, ABSENT, NO_TRIAL, has_rdma=False)
    assert (findings[0].good, facts["cuda"], facts["gpus"], facts["devices"]) == (False, False, [], [])
    assert "no NVIDIA driver" in findings[0].text
    write(
        tmp_path,
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  580.1\nGCC version: 12\n",
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 5\n",
        },
    )
    findings, facts = gpu.examine(tmp_path, ABSENT, NO_TRIAL, has_rdma=False)
    assert "--gpus" in findings[0].hint
    assert facts["driver"] == "NVIDIA UNIX Open Kernel Module  580.1"
    assert facts["gpus"] == ["NVIDIA H200"]
    findings, _ = gpu.examine(tmp_path, Outcome([], "was killed by SIGSEGV"), NO_TRIAL, has_rdma=False)
    assert "was killed by SIGSEGV" in findings[0].text
    assert all_hinted(findings)


def test_a_gpu_that_works(tmp_path):
    findings, facts = gpu.examine(tmp_path, present(H200), MOVED_BY_GPU, has_rdma=False)
    assert all(finding.good for finding in findings), findings
    subjects = ["gpu", "cuda:0", "cuda:0 kernels", "cuda:0 ways", "cuda:0 memory", "cuda", "cuda:0 copies"]
    assert [finding.subject for finding in findings] == subjects
    assert "compute capability 9.0" in one(findings, "cuda:0").text
    assert "by CUDA IPC; pools of pdkv" in one(findings, "cuda:0 memory").text
    assert facts["trial"]["detail"] == "CUDA IPC"
    assert facts["kernel_trials"] == [TRIED]


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
    findings, _ = gpu.examine(tmp_path, present({**H200, **change}), MOVED_BY_GPU, has_rdma=False)
    finding = one(findings, subject)
    assert not finding.good
    assert all(part in finding.text for part in parts), finding.text
    assert all_hinted(findings)


@pytest.mark.parametrize(
    ("change", "module", "good", "part"),
    [
        ({}, None, True, "DMA-BUF"),
        ({"dma_buf": False}, "nvidia_peermem", True, "nvidia-peermem"),
        ({"dma_buf": False}, "nv_peer_mem", True, "nvidia-peermem"),
        ({"dma_buf": False}, None, False, "nvidia-peermem is not loaded"),
        ({"dma_buf": False, "peer_memory": False}, "nvidia_peermem", False, "has no DMA-BUF"),
        ({"unseen": "GPU `0` can't be made to see"}, "nvidia_peermem", False, "can't be made to see"),
    ],
)
def test_whether_adapters_reach_a_gpu_is_said_where_there_are_any(tmp_path, change, module, good, part):
    if module:
        write(tmp_path, {f"sys/module/{module}/version": "1"})
    outcome = present({**H200, **change})
    findings, facts = gpu.examine(tmp_path, outcome, MOVED_BY_GPU, has_rdma=True)
    finding = one(findings, "cuda:0 rdma")
    assert (finding.good, facts["peer_memory_module"]) == (good, module is not None)
    assert part in finding.text
    assert all_hinted(findings)
    findings, _ = gpu.examine(tmp_path, outcome, MOVED_BY_GPU, has_rdma=False)
    assert "cuda:0 rdma" not in [finding.subject for finding in findings]


def test_a_gpu_trial_that_fails_or_dies(tmp_path):
    refused = Outcome([{"transport": "cuda", "good": False, "text": "no peer access", "hint": None}])
    for trial, part in ((refused, "no peer access"), (Outcome([], "was killed by SIGSEGV", "words"), "SIGSEGV: words")):
        findings, _ = gpu.examine(tmp_path, present(H200), trial, has_rdma=False)
        assert not one(findings, "cuda").good
        assert part in one(findings, "cuda").text
        assert all_hinted(findings)


@pytest.mark.parametrize(
    ("trial", "part"),
    [
        (Outcome([MOVED, {**TRIED, "good": False, "text": "`x` left a wrong byte"}]), "`x` left a wrong byte"),
        (Outcome([MOVED], "was killed by SIGSEGV", "words"), "was killed by SIGSEGV: words"),
    ],
)
def test_kernels_that_are_wrong_or_take_the_trial_with_them(tmp_path, trial, part):
    findings, _ = gpu.examine(tmp_path, present(H200), trial, has_rdma=False)
    assert one(findings, "cuda").good
    assert not one(findings, "cuda:0 copies").good
    assert part in one(findings, "cuda:0 copies").text
    assert all_hinted(findings)
    # Where there are none, that has been said already.
    absent = {**H200, "kernels": {"good": False, "text": "no compiler", "hint": None}}
    findings, _ = gpu.examine(tmp_path, present(absent), trial, has_rdma=False)
    assert "cuda:0 copies" not in [finding.subject for finding in findings]


def test_the_ways_that_were_measured_are_shown(tmp_path):
    findings, _ = gpu.examine(tmp_path, present(H200), MOVED_BY_GPU, has_rdma=False)
    assert one(findings, "cuda:0 ways").text == "between the host and it by a kernel"
    for hint, shown in (("please report this", "please report this"), (None, "nvidia-smi")):
        broken = {**H200, "ways": {"good": False, "text": "it wrote wrong bytes", "hint": hint}}
        findings, _ = gpu.examine(tmp_path, present(broken), MOVED_BY_GPU, has_rdma=False)
        found = one(findings, "cuda:0 ways")
        assert (found.good, shown in found.hint) == (False, True)
    findings, _ = gpu.examine(tmp_path, present({**H200, "ways": None}), MOVED_BY_GPU, has_rdma=False)
    assert "cuda:0 ways" not in [finding.subject for finding in findings], "nothing is measured without kernels"


def test_an_old_driver_is_said_to_lack_batches(tmp_path):
    findings, _ = gpu.examine(tmp_path, present({**H200, "batched_copies": False}), MOVED_BY_GPU, has_rdma=False)
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
    found = {"cuda": True, "trial": trial, "devices": [], "peer_memory_module": False}
    findings, choices = choice.examine([], NO_RDMA, {"chosen": None, "copies": []}, found)
    assert choices[-1]["transport"] == transport
    assert part in findings[-1].text
    assert all_hinted(findings)


@pytest.mark.parametrize(
    ("copy", "device", "part"),
    [
        ({"rdma": True, "cuda": True}, {}, "between hosts `ucx` straight from and to GPUs"),
        ({"rdma": True, "cuda": True}, {"dma_buf": False}, "no adapter reaches a GPU here"),
        ({"rdma": True, "cuda": True}, {"unseen": "no"}, "no adapter reaches a GPU here"),
        ({"rdma": True, "cuda": False}, {}, "UCX 1.22.0 here has no CUDA"),
        ({"rdma": False, "cuda": True}, {}, "between hosts `tcp`, through pinned memory of the host"),
    ],
)
def test_between_gpus_of_two_hosts(copy, device, part):
    copies = {"chosen": "libucp", "copies": [{"path": "libucp", "version": "1.22.0", **copy}]}
    trial = {"good": True, "detail": "CUDA IPC"}
    found = {"cuda": True, "trial": trial, "devices": [{**H200, **device}], "peer_memory_module": False}
    findings, _ = choice.examine([], NO_RDMA, copies, found)
    assert part in findings[-1].text
