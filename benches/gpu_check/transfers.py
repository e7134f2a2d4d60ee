"""Steps: whole transfers between two engines, in one process and in two, of every operation and kind of memory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pdkv
from gpu_check import caches
from gpu_check.arena import Arena, is_dry, open_arena
from gpu_check.far import Far, Other, digest, far_process, start_engine
from gpu_check.outcome import Outcome, StepFailedError, StepSkippedError
from gpu_check.store import GPU, PINNED, POOL, PRIVATE, Store
from gpu_check.transfers_env import EXPANDABLE

_SEED = 31_000
_TIMEOUT_S = 30.0
_OPERATIONS = ("pull", "push", "read", "write")


@dataclass(frozen=True)
class Case:
    """What memory is at this end and at the other, on which GPU the other's is, and which transport is to move it."""

    near: str
    far: str
    transport: str
    device: int = 0

    def __str__(self) -> str:
        far = f"{self.far}:{self.device}" if self.device else self.far
        return f"{self.near} and {far} over {self.transport}"


class Transfers:
    """This end of a case: two caches of one model, and what each operation must leave."""

    def __init__(self, arena: Arena, other: Other, case: Case, seed: int, *, large: bool = False) -> None:
        """Draws the caches, small ones or large ones, and opens both ends."""
        self._draw, self._other, self._case, self._seed = Random(seed), other, case, seed
        self._here, self._there = caches.large_pair() if large else caches.pair(self._draw)
        opened = other.ask(
            "open",
            geometry=self._there.plain(),
            kind=case.far,
            seed=seed + 1,
            device=case.device,
            transport=case.transport,
        )
        self._arena, self._store = arena, Store(arena, case.near, self._here.nbytes)
        self.engine = start_engine("near", case.transport)
        self._region = self.engine.register(self._store.owner)
        self._cache = self.engine.register_kv_cache(
            self._store.tensors(self._here), layout="BHNC", block_tokens=self._here.tokens, model="check"
        )
        self._remote = pdkv.RegionDescriptor.from_json(opened["region"])
        self._peer = self.engine.connect(opened["address"], timeout_s=_TIMEOUT_S)

    def check(self, operation: str) -> str:
        """Moves something and compares all bytes of the side that was written; gives what it rode on.

        What they must be is computed by the arena: by torch, or in a dry run by numpy. It also compares, at this end;
        the other end's bytes are compared by their digest.

        Raises:
            StepFailedError: A byte is wrong, or it went another way.
        """
        mine, theirs = (
            self._arena.random(geometry.nbytes, self._seed + salt)
            for salt, geometry in enumerate((self._here, self._there))
        )
        self._store.put(mine)
        self._other.ask("fill", seed=self._seed + 1)
        transfer, expected = self._posted(operation, mine, theirs)
        transfer.wait()
        inward = operation in ("pull", "read")
        wrong = self._store.wrong(expected) if inward else self._wrong_there(expected)
        if wrong:
            raise StepFailedError(f"{operation}, {self._case}: {wrong} bytes are wrong (seed {self._seed})")
        path, staged = transfer.path, transfer.stats.staged_bytes
        if path != self._case.transport:
            raise StepFailedError(f"{operation}, {self._case}: went over {path}: {path.detail}")
        if self._case.transport == "cuda" and staged:
            raise StepFailedError(f"{operation}, {self._case}: {staged} bytes were staged")
        return str(path.detail)

    def _posted(self, operation: str, mine: Any, theirs: Any) -> tuple[Any, Any]:
        post = self._blocks if operation in ("pull", "push") else self._spans
        until = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                return post(operation, mine, theirs)
            except pdkv.UnsupportedError as error:
                # A lane of UCX, and a try with a GPU's memory, may take longer than connecting waits for them.
                if not re.search("being (made|tried)", error.message) or time.monotonic() > until:
                    raise
            time.sleep(0.05)

    def _wrong_there(self, expected: Any) -> str:
        return "" if self._other.ask("digest")["digest"] == digest(self._arena.array(expected)) else "some"

    def _blocks(self, operation: str, mine: Any, theirs: Any) -> tuple[Any, Any]:
        here, there = caches.tables(self._draw, self._here, self._there)
        options: dict[str, Any] = {"require": self._case.transport, "timeout_s": _TIMEOUT_S, "peer": self._peer}
        verb = "export" if operation == "pull" else "offer"
        reference = self._other.ask(verb, blocks=there)["reference"]
        if operation == "pull":
            transfer = self._cache.pull(reference, here, **options)
            return transfer, caches.moved(self._arena, self._there, theirs, there, self._here, mine, here)
        transfer = self._cache.push(reference, here, **options)
        return transfer, caches.moved(self._arena, self._here, mine, here, self._there, theirs, there)

    def _spans(self, operation: str, mine: Any, theirs: Any) -> tuple[Any, Any]:
        pairs = _span_pairs(self._draw, len(mine), len(theirs))
        here = [self._region.span(at, size) for at, _, size in pairs]
        there = [self._remote.span(at, size) for _, at, size in pairs]
        options: dict[str, Any] = {"require": self._case.transport, "timeout_s": _TIMEOUT_S}
        if operation == "read":
            expected = caches.copied(mine)
            for at, from_, size in pairs:
                expected[at : at + size] = theirs[from_ : from_ + size]
            return self._peer.read(here, there, **options), expected
        expected = caches.copied(theirs)
        for from_, at, size in pairs:
            expected[at : at + size] = mine[from_ : from_ + size]
        return self._peer.write(there, here, **options), expected

    def close(self) -> None:
        """Ends both ends."""
        self.engine.close()
        self._other.ask("close")


def _span_pairs(draw: Random, mine: int, theirs: int) -> list[tuple[int, int, int]]:
    """Draws spans that do not overlap on either side, of odd sizes and places: (here, there, bytes)."""
    count = draw.randint(1, 40)
    step = min(mine, theirs) // count
    slots = [draw.sample(range(count), count) for _ in range(2)]
    pairs = []
    for first, second in zip(*slots, strict=True):
        size = draw.randint(1, max(1, step - 1))
        pairs.append((first * step + draw.randint(0, step - size), second * step + draw.randint(0, step - size), size))
    return pairs


def _run(arena: Arena, other: Other, cases: Sequence[Case], rounds: int, *, large: bool = False) -> Outcome:
    facts: dict[str, Any] = {}
    for number, case in enumerate(cases):
        for again in range(rounds):
            transfers = Transfers(arena, other, case, _SEED + 100 * number + 2 * again, large=large)
            try:
                for operation in _OPERATIONS:
                    facts[f"{operation}, {case}"] = transfers.check(operation)
            finally:
                transfers.close()
    count = len(facts) * rounds
    return Outcome(
        text=f"{count} transfers of {len(cases)} kinds, no byte is wrong (by {arena.name})",
        facts=facts,
        absent=[] if arena.devices() > 1 else ["a second GPU"],
    )


def _cuda_cases(arena: Arena) -> Iterator[Case]:
    yield Case(GPU, GPU, "cuda")
    yield Case(GPU, POOL, "cuda")
    yield Case(POOL, GPU, "cuda")
    if not arena.dry:
        yield Case(PINNED, GPU, "cuda")
    if arena.devices() > 1:
        yield Case(GPU, GPU, "cuda", device=1)


def one_process(_budget_s: float) -> Outcome:
    """Two engines in this process."""
    arena = open_arena()
    return _run(arena, Far(), list(_cuda_cases(arena)), 2)


def two_processes(_budget_s: float) -> Outcome:
    """Two processes, whose GPU memory is mapped by CUDA IPC."""
    arena = open_arena()
    with far_process() as other:
        return _run(arena, other, list(_cuda_cases(arena)), 2)


def staged(_budget_s: float) -> Outcome:
    """Two processes over TCP, staged through pinned memory."""
    arena = open_arena()
    cases = [Case(GPU, GPU, "tcp"), Case(GPU, PRIVATE, "tcp"), Case(PRIVATE, GPU, "tcp")]
    with far_process() as other:
        return _run(arena, other, cases, 1)


def ucx(_budget_s: float) -> Outcome:
    """Two processes over an adapter of this host, straight from and to the memory of the GPU.

    Raises:
        StepSkippedError: There is no UCX, or no adapter that was seen to carry a GPU's memory.
    """
    arena = open_arena()
    cases = [Case(GPU, GPU, "ucx"), Case(GPU, PRIVATE, "ucx"), Case(PRIVATE, GPU, "ucx")]
    with far_process() as other:
        try:
            return _run(arena, other, cases, 1)
        except pdkv.UnsupportedError as error:
            raise StepSkippedError(error.message, "a GPU that `ucx` reaches") from error


def expandable(_budget_s: float) -> Outcome:
    """Two processes whose torch allocates by expandable segments, which CUDA IPC can't share and VMM handles can."""
    if is_dry():
        raise StepSkippedError("torch's allocator is what is tried, and numpy is in torch's place here")
    if os.environ.get("PYTORCH_CUDA_ALLOC_CONF") != EXPANDABLE["PYTORCH_CUDA_ALLOC_CONF"]:
        raise StepFailedError("the step was not started with expandable segments")
    arena = open_arena()
    with far_process() as other:
        small = _run(arena, other, [Case(GPU, GPU, "cuda")], 2)
        large = _run(arena, other, [Case(GPU, GPU, "cuda")], 1, large=True)
    return Outcome(text=f"{small.text}; of several segments: {large.text}", facts={**small.facts, **large.facts})
