"""Step: what asking for a transfer costs, over the number of layers: the same blocks, more and more layers."""

from __future__ import annotations

from typing import Any

import pdkv
from gpu_check.arena import open_arena
from gpu_check.caches import Geometry
from gpu_check.outcome import Outcome
from gpu_check.timing import median_s

LAYERS = (1, 2, 4, 8, 16, 32, 64, 128)
_BLOCKS = 32
_ALL = list(range(_BLOCKS))


def run(_budget_s: float) -> Outcome:
    """Pulls within one process, and reads what planning and posting took."""
    arena = open_arena()
    rows: list[dict[str, Any]] = []
    for layers in LAYERS:
        geometry = Geometry(layers=layers, blocks=_BLOCKS, heads=1, tokens=16, content=64, order="LBHNC")
        with pdkv.Engine("producer") as producer, pdkv.Engine("consumer") as consumer:
            buffers = [arena.empty(geometry.nbytes) for _ in range(2)]
            source, target = (
                engine.register_kv_cache(geometry.tensors(arena, buffer), layout="BHNC", block_tokens=16)
                for engine, buffer in zip((producer, consumer), buffers, strict=True)
            )
            consumer.connect(str(producer.address))
            taken: dict[str, list[float]] = {"plan_us": [], "post_us": []}

            def take(source: Any = source, target: Any = target, taken: dict[str, list[float]] = taken) -> float:
                export = source.export(_ALL)
                transfer = target.pull(export.reference, _ALL, require="cuda")
                transfer.wait()
                for name, values in taken.items():
                    values.append(getattr(transfer.stats, name))
                return transfer.stats.plan_us + transfer.stats.post_us

            cost_us = median_s(take, takes=9)
            rows.append(
                {"layers": layers, "cost_us": cost_us, **{name: sorted(v)[len(v) // 2] for name, v in taken.items()}}
            )
    least, most = rows[0]["cost_us"], rows[-1]["cost_us"]
    return Outcome(
        text=f"planning and posting take {least:.0f} µs for a layer, {most:.0f} µs for {LAYERS[-1]}",
        facts={"growth": most / least, "blocks": _BLOCKS},
        rows=rows,
    )
