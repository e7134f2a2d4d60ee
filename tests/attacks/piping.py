"""What a process under attack does with pipes: sends arrays that say which they are, and receives and checks them."""

from __future__ import annotations

import gc
import threading
import time
from functools import cached_property
from typing import Any

import numpy as np

import pdkv

PATIENCE_S = 60.0


def numbered(seed: int, number: int, words: int) -> np.ndarray:
    """An array of uint64 that is like no other: its first word is its number, all of them name seed and place."""
    array = np.arange(words, dtype=np.uint64) * np.uint64(31) + np.uint64(seed << 48) + np.uint64(number << 32)
    array[0] = number
    return array


class Piping:
    """One engine's pipes; a host of attacks is one."""

    engine: pdkv.Engine
    peers: list[pdkv.Peer]

    @cached_property
    def pipes(self) -> list[pdkv.Pipe]:
        """All that were opened, by number."""
        return []

    def pipe(self, channel: str = "attack", **options: Any) -> int:
        """Opens this end of a pipe to the newest peer; returns its number."""
        self.pipes.append(pdkv.Pipe(self.engine, self.peers[-1], channel=channel, library="numpy", **options))
        return len(self.pipes) - 1

    def send(self, pipe: int, seed: int, first: int, count: int, words: int, timeout_s: float | None = None) -> dict:
        """Sends arrays from number `first` on and waits until they are there; tells how far it came and what it met."""
        sent, error = 0, None
        try:
            for number in range(first, first + count):
                self.pipes[pipe].send_tensor(numbered(seed, number, words), timeout_s)
                sent += 1
            self.pipes[pipe].flush(PATIENCE_S)
        except pdkv.PdkvError as met:
            error = met
        return {"sent": sent, "error": error, "queued": self.pipes[pipe].queued_bytes}

    def receive(
        self, pipe: int, seed: int, first: int, count: int, words: int, timeout_s: float = PATIENCE_S, keep: int = 0
    ) -> dict:
        """Receives arrays from number `first` on and checks every word; keeps the last few of them alive."""
        came, wrong, error = 0, 0, None
        kept: list[np.ndarray] = []
        try:
            for number in range(first, first + count):
                array = self.pipes[pipe].recv_tensor(timeout_s)
                wrong += not np.array_equal(array, numbered(seed, number, words))
                came += 1
                kept = [*kept, array][-keep:] if keep else []
        except pdkv.PdkvError as met:
            error = met
        self.kept = kept
        return {"came": came, "wrong": wrong, "error": error}

    def exchange(self, pipe: int, mine: int, theirs: int, count: int, words: int) -> dict:
        """Sends and receives as many at once."""
        told: list[dict] = []
        thread = threading.Thread(target=lambda: told.append(self.send(pipe, mine, 0, count, words)))
        thread.start()
        received = self.receive(pipe, theirs, 0, count, words)
        thread.join(PATIENCE_S)
        return {**received, "error": received["error"] or told[0]["error"]}

    def kept_wrong(self, seed: int, last: int) -> int:
        """How many of the kept arrays, of which `last` is the last, are not what they were when they came."""
        first = last - len(self.kept) + 1
        return sum(
            not np.array_equal(array, numbered(seed, number, len(array)))
            for number, array in enumerate(self.kept, first)
        )

    def queued(self, pipe: int) -> int:
        """Bytes that wait to be sent."""
        return self.pipes[pipe].queued_bytes

    def receive_bytes(self, pipe: int) -> bytes:
        """Receives an array as bytes."""
        return self.pipes[pipe].recv_tensor(PATIENCE_S).tobytes()

    def send_bytes(self, pipe: int, raw: bytes) -> None:
        """Sends bytes as an array."""
        self.pipes[pipe].send_tensor(np.frombuffer(raw, np.uint8))
        self.pipes[pipe].flush(PATIENCE_S)

    def drop_pipes(self) -> None:
        """Ends all pipes and lets go of what they brought."""
        for pipe in self.pipes:
            pipe.abort()
        self.pipes.clear()
        self.kept = []
        gc.collect()
        time.sleep(0.1)
