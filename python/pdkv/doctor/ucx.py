"""Which copies of UCX there are, what is really in each, and which one pdkv would take.

Every copy is opened in a process of its own: two can hardly share one, and one that crashes is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pdkv.doctor.child import Outcome
from pdkv.doctor.finding import Finding

__all__ = ["Candidate", "examine"]

# (origin, path, modules beside it, whether RDMA is among them, why it can't be opened in this process)
Candidate = tuple[str, str, list[str], bool, str | None]

_INSTALL_RDMA = (
    "for RDMA install the system's UCX (`apt install libucx0`, HPC-X or DOCA-OFED) or a NIXL wheel (`nixl-cu12`): "
    "no `libucx` wheel has it"
)
_INSTALL = f"`pip install 'pdkv[ucx]'` brings UCX without RDMA; {_INSTALL_RDMA}"
_INSTALL_WITHOUT_ASSERTIONS = (
    "HPC-X, a NIXL wheel (`nixl-cu12`) and a `libucx` wheel (`pdkv[ucx]`) are built without assertions"
)
_CORRECT = "`PDKV_UCX_LIBRARY` names it: correct the path, or unset it and let pdkv search"
_SUBJECT = "ucx copy"  # `ucx` is the transport
_CUDA = ("cuda", "gdr")


def examine(
    candidates: Sequence[Candidate], ask: Callable[..., Outcome], *, has_devices: bool
) -> tuple[list[Finding], dict[str, Any]]:
    """Opens each copy and looks into it.

    Args:
        candidates: The copies in the order in which pdkv tries them.
        ask: Puts the question `"ucx"` about a path to a child.
        has_devices: Whether this host has RDMA devices.

    Returns:
        The findings, and the same as data.
    """
    copies = [_look(candidate, ask) for candidate in candidates]
    chosen = next((copy for copy in copies if copy["version"]), None)
    if chosen is None:
        reasons = "; ".join(f"{copy['origin']} `{copy['path']}`: {copy['error']}" for copy in copies)
        # What is there and can't be used is worth a look; the loader's own search comes up empty where nothing is.
        there = [copy for copy in copies if "/" in copy["path"]]
        hint = next((copy["hint"] for copy in there if copy["hint"]), _INSTALL)
        finding = Finding(
            _SUBJECT,
            good=not (has_devices or there),
            text=f"no usable copy: {reasons or 'none found'}",
            hint=_CORRECT if any(copy["origin"] == "setting" for copy in copies) else hint,
        )
        return [finding], {"chosen": None, "copies": copies}
    findings = [_finding(copy, is_chosen=copy is chosen, has_devices=has_devices) for copy in copies]
    return findings, {"chosen": chosen["path"], "copies": copies}


def _look(candidate: Candidate, ask: Callable[..., Outcome]) -> dict[str, Any]:
    origin, path, modules, has_rdma_module, refused = candidate
    copy: dict[str, Any] = {
        "origin": origin,
        "path": path,
        "version": None,
        "transports": [],
        "rdma_module": has_rdma_module,
        "rdma": False,
        "cuda_module": any(module.startswith(_CUDA) for module in modules),
        "cuda": False,
        "assertions": False,
        "settings": [],
        "error": refused,
        "hint": None,
        "crash": None,
    }
    if refused:
        return copy
    outcome = ask("ucx", path)
    answer = outcome.answer or {"error": f"opening it {outcome.failure or 'gave no answer'}"}
    if outcome.failure:
        copy["crash"] = " ".join(filter(None, [f"a process that used it {outcome.failure}", outcome.printed]))
    if "error" in answer:
        return copy | {"error": answer["error"], "hint": answer.get("hint")}
    return copy | {
        "path": answer["library"],
        "version": answer["version"],
        "transports": [f"{transport}/{device}" for transport, device in answer["transports"]],
        "rdma": answer["rdma"],
        "cuda": answer["cuda"],
        "assertions": answer["assertions"],
        "settings": answer["settings"],
    }


def _finding(copy: dict[str, Any], *, is_chosen: bool, has_devices: bool) -> Finding:
    where = f"{copy['origin']} `{copy['path']}`"
    if copy["error"]:
        # The loader's own search comes up empty wherever UCX is not installed: nothing to repair.
        empty = "/" not in copy["path"]
        hint = copy["hint"] or "name another copy by `PDKV_UCX_LIBRARY`, or install a newer one"
        return Finding(_SUBJECT, good=empty, text=f"{where}: {copy['error']}", hint=None if empty else hint)
    words = [f"{where}: UCX {copy['version']}{', chosen' if is_chosen else ''}"]
    words += [f"transports {', '.join(copy['transports']) or 'not reported'}", _rdma(copy), _cuda(copy)]
    good, hint = True, None
    if is_chosen and has_devices and not copy["rdma"]:
        good = False
        hint = "look at the findings on `rdma`; `ucx_info -d` shows more" if copy["rdma_module"] else _INSTALL_RDMA
    elif not copy["rdma_module"]:
        hint = _INSTALL_RDMA
    if copy["assertions"]:
        words.append(
            "built with assertions: a peer that dies while it connects, or over UCX's `tcp`, can end this process"
        )
        good = good and not is_chosen
        hint = hint or _INSTALL_WITHOUT_ASSERTIONS
    if copy["crash"]:
        good, hint = False, "name another copy by `PDKV_UCX_LIBRARY`"
        words.append(copy["crash"])
    return Finding(_SUBJECT, good=good, text="; ".join(words), hint=hint)


def _rdma(copy: dict[str, Any]) -> str:
    if copy["rdma"]:
        return "RDMA works"
    return "RDMA is in it but finds no device" if copy["rdma_module"] else "built without RDMA"


def _cuda(copy: dict[str, Any]) -> str:
    if copy["cuda"]:
        return "CUDA works"
    return "CUDA is in it but finds no GPU" if copy["cuda_module"] else "built without CUDA"
