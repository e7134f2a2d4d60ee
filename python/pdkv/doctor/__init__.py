"""Looks at this machine, tries every transport between two processes of it, and says what it found.

Nothing is decided here that the engine decides: the trial asks the engine. Whatever could crash is asked of a child.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from pdkv import wheels
from pdkv._core import build_info, ucx_candidates
from pdkv.doctor import choice, gpu, limits, network, ucx, vllm
from pdkv.doctor.child import Outcome, ask
from pdkv.doctor.finding import Examination, Finding

__all__ = ["Examination", "Finding", "examine"]

_NEEDED = "tcp"  # the path that every machine has


def examine(root: Path = Path("/")) -> Examination:
    """Looks at everything; takes some seconds.

    Args:
        root: Where `/proc`, `/sys` and `/dev` are.
    """
    build, system = build_info(), f"{platform.python_version()} on {platform.system()} {platform.release()}"
    findings = [Finding("pdkv", good=True, text=build), Finding("python", good=True, text=system)]
    on_network, network_facts = network.examine(root)
    has_devices = bool(network_facts["rdma_ports"])
    on_limits, limit_facts = limits.examine(root, has_rdma=has_devices)
    asked = ask("cuda")
    with_gpu = ask("gpu trial") if (asked.answer or {}).get("present") else Outcome([])
    on_gpu, gpu_facts = gpu.examine(root, asked, with_gpu, has_rdma=has_devices)
    on_ucx, ucx_facts = ucx.examine(ucx_candidates(wheels.folders()), ask, has_devices=has_devices)
    on_vllm, vllm_facts = vllm.examine(vllm.look())
    trial = ask("trial")
    on_choice, choices = choice.examine(trial.answers, network_facts, ucx_facts, gpu_facts)
    findings += [*on_limits, *on_network, *on_gpu, *on_ucx, *_moves(trial), *on_choice, *on_vllm]
    facts: dict[str, Any] = {
        "pdkv": build,
        "python": system,
        "limits": limit_facts,
        "network": network_facts,
        "gpu": gpu_facts,
        "ucx": ucx_facts,
        "transports": [move for move in trial.answers if "transport" in move],
        "choices": choices,
        "vllm": vllm_facts,
    }
    return Examination(findings, facts)


def _moves(trial: Outcome) -> list[Finding]:
    findings = [
        Finding(
            move["transport"],
            good=move["good"],
            text=move["text"],
            hint=None if move["good"] else move.get("hint") or "the text names what is missing",
            needed=move["transport"] == _NEEDED,
        )
        for move in trial.answers
        if "transport" in move
    ]
    if not any(finding.subject == _NEEDED for finding in findings):
        text = f"the trial {trial.failure or 'ended before it'}: {trial.printed or 'nothing was printed'}"
        findings.append(Finding(_NEEDED, good=False, text=text, hint="please report this", needed=True))
    elif trial.failure:
        text = f"the trial {trial.failure} after these: {trial.printed or 'nothing was printed'}"
        findings.append(Finding("trial", good=False, text=text, hint="leave `ucx` out, or name another copy of UCX"))
    return findings
