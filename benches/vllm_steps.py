"""What a connector adds to an engine's steps while many requests are in flight: two real engines, stepped by hand.

The producer prefills and exports for all of them, one after another; then it is stopped (`SIGSTOP`), so that what the
consumer begins to load stays in flight; then it goes on, and everything ends. Only the time in connector hooks counts,
on the scheduler's and the worker's side. Knows no connector but by name.
"""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_first_token import prompts
from vllm_setups import Setup

from with_vllm.engines import ASK, Engine

Steps = list[tuple[int, int, int]]

_DEADLINE_S = 50.0
# Of the prompts; the rest is each one's own. What is the same is computed once.
_SHARED = 0.98
_CACHE_BYTES = 1280 << 20


def measure(folder: Path, model: Path, setup: Setup, *, in_flight: int, tokens: int, steps: int) -> dict[str, Any]:
    """Microseconds in hooks, for one set-up.

    Returns:
        For `exporting` and `loading` engines, with `in_flight` requests: an `empty` step, and what beginning and ending
        one request adds. A producer's requests begin with their prefill's answer.
    """
    common = {
        "max_model_len": tokens + 64,
        "max_num_batched_tokens": tokens + 64,
        "max_num_seqs": in_flight,
        "kv_cache_memory_bytes": _CACHE_BYTES,
    }
    engines = [
        Engine(
            f"steps-{setup.name}-{role}",
            folder,
            model,
            transfer=setup.transfer(role),
            environment=_ports(setup),
            **common,
        )
        for role in ("producer", "consumer")
    ]
    producer, consumer = engines
    try:
        for engine in engines:
            engine.wait_until_started()
        return _measured(producer, consumer, in_flight=in_flight, tokens=tokens, steps=steps)
    finally:
        for engine in engines:
            if engine.process.is_alive() and engine.process.pid:
                os.kill(engine.process.pid, signal.SIGCONT)
            engine.kill()


def _measured(producer: Engine, consumer: Engine, *, in_flight: int, tokens: int, steps: int) -> dict[str, Any]:
    shared, *own = prompts(in_flight + 1, tokens, seed=0)
    kept = int(tokens * _SHARED)
    asked = [shared[:kept] + prompt[kept:] for prompt in own]
    # Connections are there before anything is timed.
    first = producer.ask(shared, params=dict(ASK), max_tokens=1)
    consumer.ask(shared, params=first.params, max_tokens=1)
    for engine in (producer, consumer):
        engine.wait_until_idle()
        engine.call("by_hand", by_hand=True)
    consumer.call("reset_prefix_cache")

    def run(engine: Engine, function: str, **arguments: Any) -> Steps:
        found: Steps = engine.call("run", module="vllm_hooks", function=function, **arguments)
        return found

    names = [f"asked-{number}" for number in range(in_flight)]
    exported = run(
        producer,
        "add",
        requests=[(name, prompt, dict(ASK)) for name, prompt in zip(names, asked, strict=True)],
        deadline_s=_DEADLINE_S,
    )
    held = run(producer, "empty", steps=steps)
    answers = [producer.wait(name) for name in names]
    os.kill(producer.process.pid, signal.SIGSTOP)
    ordered = run(
        consumer,
        "add",
        requests=[(name, prompt, answer.params) for name, prompt, answer in zip(names, asked, answers, strict=True)],
        deadline_s=_DEADLINE_S,
    )
    waited = run(consumer, "empty", steps=steps)
    os.kill(producer.process.pid, signal.SIGCONT)
    producer.call("by_hand", by_hand=False)
    loaded = run(consumer, "drain", deadline_s=_DEADLINE_S)
    producer.wait_until_idle()
    wrong = sum(consumer.wait(name).tokens != answer.tokens for name, answer in zip(names, answers, strict=True))
    return {
        "exporting": {"empty": _summary(held, in_flight), "begin": _summary(exported[in_flight // 2 :])},
        "loading": {
            "empty": _summary(waited, in_flight),
            "begin": _summary(ordered[in_flight // 2 :]),
            "end_each_us": sum(step[0] + step[1] for step in loaded) / 1e3 / in_flight,
        },
        "wrong": wrong,
    }


def _ports(setup: Setup) -> dict[str, str]:
    from with_vllm import settings

    return {**settings.side_channel(), **setup.environment}


def _summary(steps: Sequence[tuple[int, int, int]], in_flight: int | None = None) -> dict[str, float]:
    if in_flight is not None and {step[2] for step in steps} != {in_flight}:
        waiting = sorted({step[2] for step in steps})
        raise RuntimeError(f"`{in_flight}` requests should be in flight all the time, there were `{waiting}`")
    both = sorted((step[0] + step[1]) / 1e3 for step in steps)
    return {
        "scheduler_us": statistics.median(step[0] for step in steps) / 1e3,
        "worker_us": statistics.median(step[1] for step in steps) / 1e3,
        "median_us": statistics.median(both),
        "p99_us": both[int(len(both) * 0.99)],
    }
