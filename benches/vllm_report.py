"""Tables of what `vllm_handover.py` measured, for people. Knows nothing of how it was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Row = dict[str, Any]


def line(cells: Iterable[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |\n"


def _head(*cells: str) -> str:
    return line(cells) + line(["---"] * len(cells))


def producer_ms(times: Row) -> float:
    """What exporting added to the producer's answer to one prompt."""
    return float(1e3 * (times["export"] - times["answer"]))


def consumer_ms(times: Row) -> float:
    """What loading added to the consumer's first token of one prompt."""
    return float(1e3 * (times["load"] - times["local"]))


def hand_over_ms(times: Row) -> float:
    """What both added."""
    return producer_ms(times) + consumer_ms(times)


def first_token(measured: Row) -> str:
    """The time to the first token: a line for each set-up, medians over all prompts."""
    alone = measured["alone"]
    text = _head(
        "set-up",
        "**hand-over**",
        "p90",
        "producer's part",
        "consumer's part",
        "first token",
        "wrong",
        "failed",
        "moved a prompt",
        "path",
    )
    for name, found in measured["setups"].items():
        times = found["times"]

        def of(what: Callable[[Row], float], times: Sequence[Row] = times) -> str:
            return f"{statistics.median(map(what, times)):.1f} ms"

        text += line(
            [
                f"`{name}`",
                f"**{of(hand_over_ms)}**",
                f"{_quantile([hand_over_ms(each) for each in times], 0.9):.1f} ms",
                of(producer_ms),
                of(consumer_ms),
                f"{statistics.median(each['prefill'] + each['load'] for each in times):.3f} s",
                str(found["wrong"]),
                str(found["failed"]),
                f"{2 * found['moved']['bytes'] / (found['moved']['transfers'] or 1) / 2**20:.1f} MiB",
                ", ".join(f"`{path}`" for path in found["moved"]["paths"]) or "UCX's choice",
            ]
        )
    return text + line(["none", "", "", "", "", f"{statistics.median(alone):.3f} s", "0", "0", "", ""])


def steps(measured: Row) -> str:
    """The time in hooks: a line for each set-up."""
    text = _head(
        "set-up",
        "**exporting**: a step",
        "p99",
        "a new export",
        "**loading**: a step",
        "p99",
        "a new load",
        "an ended load",
        "wrong",
    )
    for name, found in measured.items():
        cells = [f"`{name}`"]
        for role in ("exporting", "loading"):
            empty, begin = found[role]["empty"], found[role]["begin"]
            parts = f"{empty['scheduler_us']:.1f} + {empty['worker_us']:.1f}"
            cells += [f"**{empty['median_us']:.0f} µs** ({parts})", f"{empty['p99_us']:.0f} µs"]
            cells.append(f"{begin['median_us']:.0f} µs")
        text += line([*cells, f"{found['loading']['end_each_us']:.0f} µs", str(found["wrong"])])
    return text


def _quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]
