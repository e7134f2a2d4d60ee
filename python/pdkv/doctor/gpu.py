"""Whether there are GPUs and what pdkv can do with them: asked of the kernel's driver, of CUDA's, of two processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdkv.doctor.child import Outcome
from pdkv.doctor.finding import Finding

__all__ = ["examine"]

_CONTAINER = "a container needs the NVIDIA runtime (`--gpus all`)"
_REPORT = "please report this"
_NOTHING = (
    "nothing to do if this machine has no GPU, host memory moves without a driver; else install NVIDIA's for CUDA 12.0 "
    "or newer, and give a container the NVIDIA runtime (`--gpus all`)"
)
_BY_COMPILER = (
    "install the compiler of the driver's CUDA release (`pip install nvidia-cuda-nvrtc-cu12`, for CUDA 13 "
    "`nvidia-cuda-nvrtc`), or name a ready image by PDKV_CUDA_IMAGE"
)
_BUSY = "does another process hold all of its memory (`nvidia-smi`)?"
_SHARING = (
    "the processes must see the same GPU, and no border of MIG or of a container's IPC namespace may be between them"
)

_PEER_MEMORY = (
    "`modprobe nvidia-peermem`, or the open kernel modules of the driver on Linux 5.12 or newer, which have DMA-BUF"
)
_STAGED = "between hosts `tcp` moves it, through pinned memory of the host"


def examine(root: Path, cuda: Outcome, trial: Outcome, *, has_rdma: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Judges what was found.

    Args:
        root: Where `/proc` and `/sys` are.
        cuda: What asking CUDA's driver came to.
        trial: What moving bytes between two processes by a GPU came to.
        has_rdma: Whether this host has RDMA adapters.

    Returns:
        The findings, and the same as data.
    """
    driver = _driver(root / "proc/driver/nvidia/version")
    models = [_model(path) for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))]
    answer = cuda.answer or {}
    moved = next((move for move in trial.answers if move.get("transport") == "cuda"), None)
    facts = {
        "driver": driver,
        "gpus": models,
        "cuda": answer.get("present", False),
        "cuda_text": answer.get("text"),
        "devices": answer.get("gpus", []),
        "kernels": [{"place": place, "found": good, "text": text} for place, good, text in answer.get("kernels", [])],
        "trial": moved,
        "kernel_trials": [tried for tried in trial.answers if "kernels" in tried],
        "peer_memory_module": _has_module(root),
    }
    if cuda.answer is None:
        text = f"asking CUDA's driver {cuda.failure}"
        return [Finding("gpu", good=False, text=text, hint="does `nvidia-smi` work?")], facts
    if not answer["present"]:
        if driver or models:
            text = f"the kernel has the NVIDIA driver ({driver}), but {answer['text']}"
            return [Finding("gpu", good=False, text=text, hint=_CONTAINER)], facts
        return [Finding("gpu", good=False, text=f"no NVIDIA driver ({answer['text']})", hint=_NOTHING)], facts
    findings = [Finding("gpu", good=True, text=answer["text"])]
    for gpu in answer["gpus"]:
        findings += _of_one(gpu, facts["kernels"])
        if has_rdma and not gpu["error"]:
            findings.append(_adapters(gpu, has_module=facts["peer_memory_module"]))
    findings.append(_trial(trial, moved))
    findings += [_tried(gpu, trial) for gpu in answer["gpus"] if not gpu["error"] and gpu["kernels"]["good"]]
    return findings, facts


def _of_one(gpu: Mapping[str, Any], kernels: list[dict[str, Any]]) -> list[Finding]:
    subject = f"cuda:{gpu['ordinal']}"
    if gpu["error"]:
        hint = gpu["hint"] or _BUSY
        return [Finding(subject, good=False, text=gpu["error"], hint=hint)]
    text = f"`{gpu['name']}`, compute capability {gpu['capability']}"
    if not gpu["batched_copies"]:
        text += ", no batched copies (the driver is older than CUDA 12.8)"
    if gpu["isolated"]:
        hint = "use a whole GPU where two of them, or two instances, are to exchange memory"
        findings = [Finding(subject, good=False, text=f"{text}; {gpu['isolated']}", hint=hint)]
    else:
        findings = [Finding(subject, good=True, text=text)]
    findings.append(_kernels(subject, gpu["kernels"], kernels))
    if gpu["ways"]:
        findings.append(_ways(subject, gpu["ways"]))
    return [*findings, _shared(subject, gpu)]


def _kernels(subject: str, found: Mapping[str, Any], places: list[dict[str, Any]]) -> Finding:
    """Where the kernels come from; where they can't be had, what was found at each place."""
    if found["good"]:
        return Finding(f"{subject} kernels", good=True, text=found["text"])
    looked = "; ".join(f"{place['place']}: {place['text']}" for place in places)
    text = f"{found['text']} (looked at {looked})" if looked else found["text"]
    return Finding(f"{subject} kernels", good=False, text=text, hint=found["hint"] or _BY_COMPILER)


def _ways(subject: str, found: Mapping[str, Any]) -> Finding:
    """How bytes were measured to go fastest."""
    hint = None if found["good"] else found["hint"] or _BUSY
    return Finding(f"{subject} ways", good=found["good"], text=found["text"], hint=hint)


def _shared(subject: str, gpu: Mapping[str, Any]) -> Finding:
    """Which memory of the GPU other processes can map."""
    ways = [gpu["ipc"], gpu["pool"]]
    text = "other processes can map " + "; ".join(way["text"] for way in ways if way["good"])
    refused = "; ".join(way["text"] for way in ways if not way["good"])
    if not refused:
        return Finding(f"{subject} memory", good=True, text=text)
    none = not any(way["good"] for way in ways)
    text = f"no other process can map any: {refused}" if none else f"{text}; but not all: {refused}"
    hint = next((way["hint"] for way in ways if way["hint"]), None) or _SHARING
    return Finding(f"{subject} memory", good=False, text=text, hint=hint)


def _adapters(gpu: Mapping[str, Any], *, has_module: bool) -> Finding:
    """Whether this host's adapters reach the GPU's memory themselves."""
    subject = f"cuda:{gpu['ordinal']} rdma"
    if gpu["unseen"]:
        return Finding(subject, good=False, text=gpu["unseen"], hint=_STAGED)
    if gpu["dma_buf"]:
        return Finding(subject, good=True, text="adapters reach its memory by DMA-BUF")
    if gpu["peer_memory"] and has_module:
        return Finding(subject, good=True, text="adapters reach its memory by nvidia-peermem")
    lack = "and nvidia-peermem is not loaded" if gpu["peer_memory"] else "nor the GPU memory for other devices"
    text = f"adapters don't reach its memory: the driver has no DMA-BUF, {lack}"
    return Finding(subject, good=False, text=text, hint=_PEER_MEMORY if gpu["peer_memory"] else _STAGED)


def _has_module(root: Path) -> bool:
    return any((root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem"))


def _trial(trial: Outcome, moved: Mapping[str, Any] | None) -> Finding:
    if moved is None:
        text = f"the trial {trial.failure or 'ended before it'}: {trial.printed or 'nothing was printed'}"
        return Finding("cuda", good=False, text=text, hint=_REPORT)
    hint = None if moved["good"] else moved.get("hint") or _SHARING
    return Finding("cuda", good=moved["good"], text=moved["text"], hint=hint)


def _tried(gpu: Mapping[str, Any], trial: Outcome) -> Finding:
    """Whether the GPU's kernels do what they should."""
    subject = f"cuda:{gpu['ordinal']} copies"
    tried = next((answer for answer in trial.answers if answer.get("kernels") == gpu["ordinal"]), None)
    if tried is None:
        text = f"the trial {trial.failure or 'ended before it'}: {trial.printed or 'nothing was printed'}"
        return Finding(subject, good=False, text=text, hint=_REPORT)
    hint = None if tried["good"] else tried["hint"] or _REPORT
    return Finding(subject, good=tried["good"], text=tried["text"], hint=hint)


def _driver(path: Path) -> str | None:
    if not path.is_file():
        return None
    return path.read_text().splitlines()[0].partition(":")[2].strip()


def _model(path: Path) -> str:
    for line in path.read_text().splitlines():
        if line.startswith("Model:"):
            return line.partition(":")[2].strip()
    return "unknown model"
