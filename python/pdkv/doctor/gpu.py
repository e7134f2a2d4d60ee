"""Whether there are GPUs, asked of the kernel's driver and of CUDA's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdkv.doctor.child import Outcome
from pdkv.doctor.finding import Finding

__all__ = ["examine"]

_HINT = "this release moves host memory only, so nothing is lost: stage GPU tensors through the CPU"


def examine(root: Path, cuda: Outcome) -> tuple[list[Finding], dict[str, Any]]:
    """Judges what was found.

    Args:
        root: Where `/proc` is.
        cuda: What asking CUDA's driver came to.

    Returns:
        The findings, and the same as data.
    """
    driver = _driver(root / "proc/driver/nvidia/version")
    gpus = [_model(path) for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))]
    answer = cuda.answer or {}
    facts = {"driver": driver, "gpus": gpus, "cuda": answer.get("present", False), "cuda_text": answer.get("text")}
    if cuda.answer is None:
        finding = Finding(
            "gpu", good=False, text=f"asking CUDA's driver {cuda.failure}", hint="does `nvidia-smi` work?"
        )
    elif answer["present"]:
        names = ", ".join(gpus) or "models not shown"
        finding = Finding("gpu", good=True, text=f"{answer['text']}: {names}; not used yet: {_HINT}")
    elif driver or gpus:
        text = f"the kernel has the NVIDIA driver ({driver}), but {answer['text']}"
        finding = Finding("gpu", good=False, text=text, hint="a container needs the NVIDIA runtime (`--gpus all`)")
    else:
        finding = Finding("gpu", good=False, text=f"no NVIDIA driver ({answer['text']})", hint=_HINT)
    return [finding], facts


def _driver(path: Path) -> str | None:
    if not path.is_file():
        return None
    return path.read_text().splitlines()[0].partition(":")[2].strip()


def _model(path: Path) -> str:
    for line in path.read_text().splitlines():
        if line.startswith("Model:"):
            return line.partition(":")[2].strip()
    return "unknown model"
