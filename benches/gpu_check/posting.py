"""Step: what asking for a transfer costs, over the number of layers: the same blocks, more and more layers.

What is promised is of the whole: planning, choosing the way, telling the peer, posting. `queue` is the GPU's part of it
alone: tables, launch and event, by the same plan.
"""

from __future__ import annotations

from typing import Any

import pdkv
from gpu_check.arena import open_arena
from gpu_check.caches import Geometry
from gpu_check.outcome import Outcome
from gpu_check.timing import median_s
from pdkv._core import CudaLoop, cache_regions

LAYERS = (1, 2, 4, 8, 16, 32, 64, 128)
_BLOCKS = 32
_ALL = list(range(_BLOCKS))


def run(_budget_s: float) -> Outcome:
    """Pulls within one process, and reads what planning and posting took."""
    arena, loop = open_arena(), CudaLoop()
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
                return float(transfer.stats.plan_us + transfer.stats.post_us)

            cost_us = median_s(take, takes=9)
            medians = {name: sorted(values)[len(values) // 2] for name, values in taken.items()}
            queue_us = _queue_us(loop, [geometry.tensors(arena, buffer) for buffer in buffers])
            rows.append({"layers": layers, "cost_us": cost_us, **medians, "queue_us": queue_us})
    least, most = rows[0]["cost_us"], rows[-1]["cost_us"]
    return Outcome(
        text=f"planning and posting take {least:.0f} µs for a layer, {most:.0f} µs for {LAYERS[-1]}",
        facts={
            "growth": most / least,
            "queue_growth": rows[-1]["queue_us"] / max(rows[0]["queue_us"], 1e-3),
            "blocks": _BLOCKS,
        },
        rows=rows,
    )


def _queue_us(loop: CudaLoop, ends: list[dict[str, Any]]) -> float:
    """What the GPU's queue takes of the host for the same copy, once it is warm."""
    layouts = [pdkv.resolve_layout(tensors, layout="BHNC", block_tokens=16) for tensors in ends]
    bases = [[at for at, _ in cache_regions(tensors, layout="BHNC", block_tokens=16)] for tensors in ends]
    copy = loop.plan(pdkv.plan(layouts[0], _ALL, layouts[1], _ALL), *bases)

    def take() -> float:
        copy.run(1)
        return float(copy.post_us)

    return median_s(take, takes=9)
