"""What pdkv would use between two processes of this host, between two hosts, and between GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdkv.doctor.finding import Finding

__all__ = ["examine"]

_MEMORY = {"pool": "memory in pools of pdkv, or adopted", "private": "other memory"}


def examine(
    moves: Sequence[dict[str, Any]], network: dict[str, Any], ucx: dict[str, Any], gpu: dict[str, Any]
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Says what would be chosen.

    Args:
        moves: What the trial between two processes came to.
        network: The facts about the network.
        ucx: The facts about UCX.
        gpu: The facts about GPUs.

    Returns:
        The findings, and the same as data: what is between, the transport or `None`, and why.
    """
    choices = [_this_host(move) for move in moves if "choice" in move]
    choices += [_another_host(network, ucx), _gpus(ucx, gpu)]
    findings = [
        Finding(
            "choice",
            good=choice["transport"] is not None,
            text=f"{choice['between']}: {choice['transport'] or 'nothing'}, {choice['why']}",
            hint=choice.pop("hint"),
        )
        for choice in choices
    ]
    return findings, choices


def _this_host(move: dict[str, Any]) -> dict[str, Any]:
    return {
        "between": f"this host, {_MEMORY[move['choice']]}",
        "transport": move["path"] if move["good"] else None,
        "why": move["detail"] if move["good"] else move["text"],
        "hint": None if move["good"] else move.get("hint") or "the findings on each transport say why",
    }


def _another_host(network: dict[str, Any], ucx: dict[str, Any]) -> dict[str, Any]:
    chosen = next((copy for copy in ucx["copies"] if copy["path"] == ucx["chosen"]), None)
    if chosen and chosen["rdma"]:
        why = (
            f"by RDMA with UCX {chosen['version']} where the peer has it too and its port can be reached, otherwise tcp"
        )
        return {"between": "another host", "transport": "ucx", "why": why, "hint": None}
    if not network["rdma_ports"]:
        why, hint = "no RDMA device here", None
    elif chosen is None:
        why, hint = "there is an RDMA device, but no UCX", "the finding on `ucx copy` says what to install"
    else:
        why, hint = f"UCX {chosen['version']} here does no RDMA", "the findings on `ucx copy` and `rdma` say why"
    return {"between": "another host", "transport": "tcp", "why": why, "hint": hint}


def _gpus(ucx: dict[str, Any], gpu: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"between": "GPU to GPU", "transport": None, "hint": None}
    moved = gpu["trial"]
    if not gpu["cuda"]:
        return {**found, "why": "no GPU here", "hint": "the finding on `gpu` says why"}
    if moved is None or not moved["good"]:
        return {
            **found,
            "why": "two processes can't reach each other's memory",
            "hint": "the finding on `cuda` says why",
        }
    why = f"on this host, {moved['detail']}; between hosts {_gpus_afar(ucx, gpu)}"
    return {**found, "transport": "cuda", "why": why}


def _gpus_afar(ucx: dict[str, Any], gpu: dict[str, Any]) -> str:
    staged = "`tcp`, through pinned memory of the host"
    chosen = next((copy for copy in ucx["copies"] if copy["path"] == ucx["chosen"]), None)
    if not (chosen and chosen["rdma"]):
        return staged
    if not chosen["cuda"]:
        return f"{staged}: UCX {chosen['version']} here has no CUDA"
    module = gpu["peer_memory_module"]
    seen = [device for device in gpu["devices"] if not (device["error"] or device["unseen"])]
    if any(device["dma_buf"] or (device["peer_memory"] and module) for device in seen):
        return f"`ucx` straight from and to GPUs where a try shows that adapters carry it, else {staged}"
    return f"{staged}: no adapter reaches a GPU here"
