"""Makes the calls of a release's trace on a connector. Whoever replays says when, and what the arguments are."""

from __future__ import annotations

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

from connectors.releases import number

TRACES = Path(__file__).parent / "traces"
# The releases that changed something, and an old one that goes by the oldest of them.
CHANGES = sorted((path.stem for path in TRACES.glob("*.json")), key=number)


@cache
def trace(release: str) -> dict[str, Any]:
    """What holds for a release: the newest trace that is not newer."""
    holds = [change for change in CHANGES if number(change) <= number(release)] or CHANGES[:1]
    loaded: dict[str, Any] = json.loads((TRACES / f"{holds[-1]}.json").read_text())
    return loaded


def replay(release: str, part: str, connector: Any, before_call: Any = None, **arguments: Any) -> dict[str, Any]:
    """Makes the calls of one part of a trace, in its order.

    Args:
        release: The release of vLLM.
        part: Such as `arrival`; parts that the release hasn't are empty.
        connector: Whom to call.
        before_call: Called with each hook's name first.
        **arguments: Values of the arguments' names.

    Returns:
        What the hooks returned, by hook.
    """
    gave = {}
    for hook, *names in trace(release).get(part, ()):
        if before_call is not None:
            before_call(hook)
        gave[hook] = getattr(connector, hook)(*(arguments[name] for name in names))
    return gave


def arity(release: str, part: str) -> dict[str, int]:
    """With how many arguments a part calls its hooks."""
    return {hook: len(names) for hook, *names in trace(release)[part]}


def parts(release: str) -> list[str]:
    """The parts that a release's trace has."""
    return [part for part, calls in trace(release).items() if isinstance(calls, list)]


def takes(signature: inspect.Signature, positions: int) -> bool:
    """Whether a signature accepts so many arguments by position."""
    try:
        signature.bind(*[None] * positions)
    except TypeError:
        return False
    return True
