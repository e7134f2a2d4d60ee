"""How long vLLM spends in the hooks of its connector, step by step: runs within the process of an engine.

The hooks of both sides are wrapped by clocks, and the engine's own steps call them. All is counted that vLLM asks of a
connector, by whichever hook: nothing here knows which connector it is.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

if TYPE_CHECKING:
    from with_vllm.engine_process import Host

Steps = list[tuple[int, int, int]]

_GREEDY = {"temperature": 0, "max_tokens": 1, "ignore_eos": True, "logprobs": 1}
_CLOCKS: dict[int, Clocks] = {}


class Clocks:
    """Nanoseconds spent in the hooks of each side since they were last taken."""

    def __init__(self, scheduler: Any, worker: Any) -> None:
        self._spent = [0, 0]
        self._inside = False
        for side, connector in enumerate((scheduler, worker)):
            for name in dir(KVConnectorBase_V1):
                if not name.startswith("_") and callable(hook := getattr(connector, name)):
                    setattr(connector, name, self._wrapped(hook, side))

    def _wrapped(self, hook: Callable[..., Any], side: int) -> Callable[..., Any]:
        clock = time.perf_counter_ns

        @functools.wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a hook that another calls is in that one's time
                return hook(*args, **kwargs)
            self._inside = True
            begun = clock()
            try:
                return hook(*args, **kwargs)
            finally:
                self._spent[side] += clock() - begun
                self._inside = False

        return timed

    def take(self) -> tuple[int, int]:
        """Gives both sides' nanoseconds and begins anew."""
        scheduler, worker = self._spent
        self._spent = [0, 0]
        return scheduler, worker


def _clocks(host: Host) -> Clocks:
    if id(host) not in _CLOCKS:
        _CLOCKS[id(host)] = Clocks(host.core.scheduler.connector, get_kv_transfer_group())
    return _CLOCKS[id(host)]


def _waiting(host: Host) -> int:
    """Requests that wait for a load, or whose blocks wait for a consumer."""
    requests = host.core.scheduler.requests.values()
    return sum(request.status.name == "WAITING_FOR_REMOTE_KVS" or request.is_finished() for request in requests)


def empty(host: Host, *, steps: int) -> Steps:
    """Steps an engine with nothing to compute.

    Returns:
        Nanoseconds on the scheduler and the worker side, and how many requests wait then, for each step.
    """
    clocks = _clocks(host)
    clocks.take()
    taken = []
    for _ in range(steps):
        host.do_step()
        taken.append((*clocks.take(), _waiting(host)))
    return taken


def add(host: Host, *, requests: Sequence[tuple[str, list[int], dict[str, Any]]], deadline_s: float) -> Steps:
    """Adds requests one at a time, the next when the last one waits, and gives what `empty` does, summed by request."""
    clocks = _clocks(host)
    clocks.take()
    end = time.monotonic() + deadline_s
    taken = []
    for request_id, prompt, params in requests:
        before = _waiting(host)
        host.do_add(request_id, prompt, _GREEDY, params)
        steps = []
        while _waiting(host) <= before:
            if time.monotonic() > end:
                raise RuntimeError(f"request `{request_id}` doesn't wait: {host.do_states('')}")
            host.do_step()
            steps.append(clocks.take())
        host.do_step()  # what a finished request leaves to do is done by the next step
        steps.append(clocks.take())
        taken.append((sum(step[0] for step in steps), sum(step[1] for step in steps), _waiting(host)))
    return taken


def drain(host: Host, *, deadline_s: float) -> Steps:
    """Steps until nothing waits any more, and gives what `empty` does."""
    clocks = _clocks(host)
    clocks.take()
    end = time.monotonic() + deadline_s
    taken = []
    while host.do_busy():
        if time.monotonic() > end:
            raise RuntimeError(f"requests still wait: {host.do_states('')}")
        host.do_step()
        taken.append((*clocks.take(), _waiting(host)))
    return taken
