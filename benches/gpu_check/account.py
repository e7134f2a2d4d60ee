"""What was run of the steps without a GPU, on what, and what was not: the last words of `make gpu-check DRY=1`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from gpu_check.outcome import PASSED, SKIPPED

Steps = Mapping[str, Mapping[str, object]]


def table(numpy: Steps, torch: Steps, in_name: Mapping[str, str]) -> list[str]:
    """Gives a line for each step: what came of it with numpy in torch's place, and with torch.

    Args:
        numpy: What the steps of the one run said.
        torch: What those of the other said; nothing where it was not run.
        in_name: By a step's name, what stood in the place of a tool, a library or a device there.
    """
    lines = [f"{'step':<20} {'with numpy':<11} {'with torch':<11} what stood in"]
    for name in numpy:
        states = [str(steps[name]["state"]) if name in steps else "not run" for steps in (numpy, torch)]
        lines.append(f"{name:<20} {states[0]:<11} {states[1]:<11} {in_name.get(name, '')}".rstrip())
    both = {name: [steps[name]["state"] for steps in (numpy, torch) if name in steps] for name in numpy}
    ran = [name for name, states in both.items() if set(states) != {SKIPPED}]
    lines.append(f"{len(ran)} of {len(numpy)} steps ran")
    lines += [f"not run: {name}: {torch.get(name, numpy[name])['text']}" for name in numpy if name not in ran]
    return lines


def unshown(steps: Steps, wanted: Mapping[str, str]) -> list[str]:
    """Names what the steps that were run must show and don't.

    Args:
        steps: What they said.
        wanted: By a step's name, a pattern that is to be found in what it said; it must have passed.
    """
    missing = []
    for name, pattern in wanted.items():
        if name not in steps:
            continue
        state, text = steps[name]["state"], steps[name]["text"]
        if state != PASSED or not re.search(pattern, json.dumps(steps[name])):
            missing.append(f"`{name}` was to show `{pattern}`: it says `{state}`: {text}")
    return missing
