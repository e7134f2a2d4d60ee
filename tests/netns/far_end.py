"""The process in a namespace: an engine with a cache, told what to do by lines of JSON on standard input."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

import pdkv

LAYERS, BLOCKS, BLOCK_TOKENS, WIDTH = 4, 96, 16, 1024
MOVED = 64
PAYLOAD_BYTES = LAYERS * MOVED * BLOCK_TOKENS * WIDTH * 2
EMPTY = 0xEE


def content(stamp: int) -> np.ndarray:
    """What the moved blocks hold: other bytes for every stamp."""
    shape = (LAYERS, MOVED, 1, BLOCK_TOKENS, WIDTH * 2)
    return np.random.default_rng(stamp).integers(0, 256, shape, np.uint8)


class FarEnd:
    def start(
        self, listen: str, seed: int, transports: list[str] | None = None, ucx: dict[str, Any] | None = None
    ) -> str:
        """Makes the engine and the cache; gives the address."""
        options = {} if ucx is None else {"ucx": pdkv.UcxConfig(**ucx)}
        self.engine = pdkv.Engine(f"far-{seed}", listen=listen, transports=transports, insecure=True, **options)
        self.memory = np.full((LAYERS, BLOCKS, 1, BLOCK_TOKENS, WIDTH * 2), EMPTY, np.uint8)
        self.cache = self.engine.register_kv_cache(self.memory, layout="LBHNC", block_tokens=BLOCK_TOKENS)
        self.ids = np.random.default_rng(seed).permutation(BLOCKS)[:MOVED]
        return self.engine.address

    def fill(self, stamp: int) -> None:
        self.memory[:] = EMPTY
        self.memory[:, self.ids] = content(stamp)

    def clear(self) -> None:
        self.memory[:] = EMPTY

    def wrong_bytes(self, stamp: int) -> int:
        """Counts bytes that are not those of the stamp, and bytes beside them that were touched."""
        others = np.setdiff1d(np.arange(BLOCKS), self.ids)
        wrong = np.count_nonzero(self.memory[:, self.ids] != content(stamp))
        return int(wrong + np.count_nonzero(self.memory[:, others] != EMPTY))

    def export(self) -> str:
        self.kept = self.cache.export(self.ids, num_tokens=MOVED * BLOCK_TOKENS, lease_s=60)
        return self.kept.reference.to_json()

    def offer(self) -> str:
        self.kept = self.cache.offer(self.ids, num_tokens=MOVED * BLOCK_TOKENS, lease_s=60)
        return self.kept.reference.to_json()

    def move(self, reference: str) -> dict[str, Any]:
        """Pulls an export or pushes to an offer; says how."""
        wanted = pdkv.Reference.from_json(reference)
        self.engine.connect(wanted.address, timeout_s=30)
        go = self.cache.push if wanted.kind == "offer" else self.cache.pull
        transfer = go(wanted, self.ids, timeout_s=60)
        transfer.wait(timeout_s=60)
        path, stats = transfer.path, transfer.stats
        return {
            "transport": str(path),
            "detail": path.detail,
            "reasons": path.reasons,
            "bytes": stats.bytes,
            "staged_bytes": stats.staged_bytes,
        }

    def close(self) -> None:
        self.engine.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not an answer
    far = FarEnd()
    for line in sys.stdin:
        call, arguments = json.loads(line)
        try:
            answer = [True, getattr(far, call)(**arguments)]
        except Exception as error:  # noqa: BLE001 - the test is told
            answer = [False, f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
