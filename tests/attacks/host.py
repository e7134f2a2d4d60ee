"""What runs in the other process: one engine, one KV cache with known contents, and what a test asks of them.

Every word of the cache names the cache's seed and its own place, so a wrong word says where it came from. Exports,
transfers and peers stay here; the test knows them by number.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import pdkv
from attacks.piping import Piping

WORD = 8
SEED_STEP = np.uint64(1 << 40)
BACKGROUND = 1000


def scrap(nbytes: int, seed: int) -> np.ndarray:
    """Bytes that tell their place and seed apart from any near ones."""
    at = np.arange(nbytes, dtype=np.uint64)
    return ((at * np.uint64(31)) ^ (at >> np.uint64(8)) ^ np.uint64(seed * 77)).astype(np.uint8)


class Host(Piping):
    """One engine with one cache."""

    def __init__(
        self,
        name: str,
        *,
        pool: bool = False,
        layers: int = 2,
        blocks: int = 64,
        block_bytes: int = 1024,
        seed: int | None = BACKGROUND,
        adopt: bool = False,
        environment: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        os.environ.update(environment or {})
        settings = {"heartbeat_s": 0.5, "peer_timeout_s": 20.0, **settings}
        self.engine = pdkv.Engine(name, **settings)
        nbytes = layers * blocks * block_bytes
        owner = self.engine.allocate(nbytes, huge_pages=False) if pool else np.empty(nbytes, np.uint8)
        flat = np.frombuffer(owner, np.uint8)
        self.words = flat.view(np.uint64).reshape(layers, blocks, block_bytes // WORD)
        if seed is not None:
            self.stamp(seed)
        memory = flat.reshape(layers, blocks, 1, 16, block_bytes // 16)
        self.cache = self.engine.register_kv_cache(memory, layout="LBHNC", block_tokens=16, adopt=adopt)
        self.exports: list[pdkv.Export] = []
        self.transfers: list[pdkv.Transfer] = []
        self.peers: list[pdkv.Peer] = []
        self.fillers: list[int] = []  # descriptors that fill the gaps
        self.limited = False
        self.lent: np.ndarray | None = None

    def address(self) -> str | None:
        """Where the engine listens."""
        return self.engine.address

    # Contents

    def pattern(self, seed: int, block: int) -> np.ndarray:
        """The words of one block in every layer."""
        layers, blocks, words = self.words.shape
        first = (np.arange(layers, dtype=np.uint64) * np.uint64(blocks) + np.uint64(block)) * np.uint64(words)
        return first[:, None] + np.arange(words, dtype=np.uint64) + SEED_STEP * np.uint64(seed)

    def stamp(self, seed: int, blocks: list[int] | None = None) -> None:
        """Writes the pattern of a seed into blocks, all by default."""
        for block in range(self.words.shape[1]) if blocks is None else blocks:
            self.words[:, block] = self.pattern(seed, block)

    def wrong(
        self, seed: int, pairs: list[tuple[int, int]], layers: list[int] | None = None
    ) -> list[tuple[int, int, int]]:
        """The (block here, seed, block there) found where the pattern of other blocks `pairs[..][0]` should be."""
        found = []
        every, blocks, words = self.words.shape
        wanted = list(range(every)) if layers is None else layers
        for there, here in pairs:
            block = self.words[wanted, here]
            bad = block[block != self.pattern(seed, there)[wanted]]
            found += [(here, int(word // SEED_STEP), int(word % SEED_STEP) // words % blocks) for word in bad[:1]]
        return found

    # Memory for raw reads and writes

    def lend(self, nbytes: int, seed: int) -> str:
        """Registers memory with a pattern; returns its descriptor as JSON."""
        self.lent = scrap(nbytes, seed)
        self.region = self.engine.register(self.lent)
        return self.region.describe().to_json()

    def relend(self, seed: int) -> None:
        """Writes another pattern into it."""
        self.lent[:] = scrap(len(self.lent), seed)

    def lent_wrong(self, seed: int, pieces: list[tuple[int, int, int, int]]) -> list[int]:
        """Where it differs from its pattern with pieces (here, there, length, seed) of others put in."""
        expected = scrap(len(self.lent), seed)
        for here, there, length, other in pieces:
            expected[here : here + length] = scrap(len(self.lent), other)[there : there + length]
        return np.flatnonzero(self.lent != expected)[:8].tolist()

    def raw(self, verb: str, peer: int, theirs: str, pieces: list[tuple[int, int, int]]) -> dict[str, Any]:
        """Reads or writes pieces (here, there, length) of a peer's region, and waits for the end."""
        far = pdkv.RegionDescriptor.from_json(theirs)
        here = [self.region.span(mine, length) for mine, _, length in pieces]
        there = [far.span(at, length) for _, at, length in pieces]
        dst, src = (here, there) if verb == "read" else (there, here)
        self.transfers.append(getattr(self.peers[peer], verb)(dst, src))
        outcome = self.outcome(len(self.transfers) - 1)
        self.transfers.pop()
        return outcome

    # Exports and offers

    def export(self, blocks: list[int], **options: Any) -> tuple[int, str]:
        """Exports blocks; returns the number and the reference as JSON."""
        return self._pin(self.cache.export(blocks, **options))

    def offer(self, blocks: list[int], **options: Any) -> tuple[int, str]:
        """Offers blocks; returns the number and the reference as JSON."""
        return self._pin(self.cache.offer(blocks, **options))

    def _pin(self, export: pdkv.Export) -> tuple[int, str]:
        self.exports.append(export)
        return len(self.exports) - 1, export.reference.to_json()

    def export_state(self, number: int) -> tuple[str, bool]:
        """Where it stands, and whether it is quiesced."""
        return self.exports[number].state, self.exports[number].quiesced

    def release(self, number: int) -> None:
        """Takes the blocks back."""
        self.exports[number].release()

    def wait_quiesced(self, number: int, guard_s: float = 60.0) -> bool:
        """Waits until the blocks of an export may be reused."""
        return self.exports[number].wait_quiesced(guard_s)

    # Connections and transfers

    def connect(self, address: str, timeout_s: float = 30.0) -> int:
        """Connects; returns the number of the peer."""
        self.peers.append(self.engine.connect(address, timeout_s=timeout_s))
        return len(self.peers) - 1

    def lane(self, number: int) -> str:
        """What is said of the lane of UCX to a peer."""
        return {name: why for name, _, why in self.peers[number].links()}["ucx"]

    def alive(self, number: int) -> bool:
        """Whether the connection holds."""
        return self.peers[number].alive

    def reconnect(self, address: str, rounds: int, timeout_s: float = 30.0) -> None:
        """Connects and closes again and again."""
        for _ in range(rounds):
            self.engine.connect(address, timeout_s=timeout_s).close()

    def pull(self, reference: str, into: list[int], **options: Any) -> int:
        """Starts a pull; returns its number."""
        self.transfers.append(self.cache.pull(reference, into=into, **options))
        return len(self.transfers) - 1

    def push(self, reference: str, blocks: list[int], **options: Any) -> int:
        """Starts a push; returns its number."""
        self.transfers.append(self.cache.push(reference, blocks, **options))
        return len(self.transfers) - 1

    def start_all(self, verb: str, jobs: list[tuple[str, list[int]]], **options: Any) -> list[int | Exception]:
        """Starts many transfers at once; an error instead of a number where the start was refused."""
        started: list[int | Exception] = []
        for reference, blocks in jobs:
            try:
                started.append(getattr(self, verb)(reference, blocks, **options))
            except pdkv.PdkvError as error:
                started.append(error)
        return started

    def outcome(self, number: int, guard_s: float = 60.0) -> dict[str, Any]:
        """Waits for a transfer's end and its quiescence, and says what became of it."""
        transfer = self.transfers[number]
        if not transfer.poll():
            with suppress(pdkv.PdkvError):  # judged below, as the transfer remembers it
                transfer.wait(guard_s)
        return {
            "state": transfer.state,
            "error": transfer.error,
            "destination": transfer.destination,
            "quiesced": transfer.wait_quiesced(guard_s),
            "path": transfer.path.transport,
            "detail": transfer.path.detail,
            "rdma": transfer.path.rdma,
            "staged_bytes": transfer.stats.staged_bytes,
        }

    def try_pull(self, reference: str, into: list[int], **options: Any) -> dict[str, Any]:
        """Pulls and waits; an error at the start is an outcome too."""
        try:
            number = self.pull(reference, into, **options)
        except pdkv.PdkvError as error:
            return {"state": "refused", "error": error, "destination": "untouched", "quiesced": True}
        outcome = self.outcome(number)
        self.transfers.pop()
        return outcome

    def try_many(self, references: list[str], into: list[int]) -> list[tuple[str, str, str]]:
        """Reads and pulls each of them; returns class of the error, state and destination of each."""
        found = []
        for reference in references:
            outcome = self.try_pull(reference, into, timeout_s=30.0)
            found.append((type(outcome["error"]).__name__, outcome["state"], outcome["destination"]))
        return found

    def state(self, number: int) -> str:
        """Where a transfer stands."""
        return self.transfers[number].state

    def cancel(self, number: int) -> None:
        """Asks a transfer to end."""
        self.transfers[number].cancel()

    def cancel_storm(self, references: list[str], into: list[int], seed: int) -> dict[str, int]:
        """Starts every transfer and cancels it at a random moment; returns how many ended how."""
        random = np.random.default_rng(seed)
        ends: dict[str, int] = {}
        for reference in references:
            transfer = self.cache.pull(reference, into=into)
            for _ in range(int(random.integers(0, 60))):
                transfer.poll()
            if random.integers(0, 2):
                time.sleep(float(random.random()) * 0.001)
            transfer.cancel()
            assert transfer.wait_quiesced(60.0)
            ends[transfer.state] = ends.get(transfer.state, 0) + 1
        return ends

    def pulls_at_once(self, reference: str, count: int, into: list[int]) -> dict[str, int]:
        """Starts so many transfers before it waits for any; gives how many ended how, and what the failed ones say."""
        transfers = [self.cache.pull(reference, into=into, timeout_s=600.0) for _ in range(count)]
        ends: dict[str, int] = {}
        for transfer in transfers:
            try:
                transfer.wait(600.0)
                end = str(transfer.state)
            except pdkv.PdkvError as error:
                end = f"{error.kind}: {error}"
            ends[end] = ends.get(end, 0) + 1
        return ends

    # Things that happen in the middle of others

    def recycle(self, number: int, after_s: float, seed: int, blocks: list[int]) -> None:
        """Takes an export back and writes something else into its blocks at once."""
        time.sleep(after_s)
        self.exports[number].release()
        self.stamp(seed, blocks)

    def await_claim(self) -> None:
        """Waits until a claim is alive on what is exported now, or was and is over already."""
        exports = [export for export in self.exports if export.state == "active"]
        while not self.engine.stats["live_claims"] and all(export.state == "active" for export in exports):
            time.sleep(0.0001)

    def when_claimed(self, deed: str, *arguments: Any) -> None:
        """Does something as soon as a claim is granted here, in the background."""

        def watch() -> None:
            self.await_claim()
            getattr(self, deed)(*arguments)

        threading.Thread(target=watch, daemon=True).start()

    def pull_again_and_again(self, reference: str, pairs: list[tuple[int, int]], seed: int, times: int) -> int:
        """Pulls the same blocks many times and checks every word each time; returns how often that went well."""
        for _ in range(times):
            self.stamp(BACKGROUND, [here for _, here in pairs])
            transfer = self.cache.pull(reference, into=[here for _, here in pairs], timeout_s=60.0)
            transfer.wait(60.0)
            assert self.wrong(seed, pairs) == []
        return times

    def pull_after_connecting(self, address: str, reference: str, into: list[int], rounds: int) -> None:
        """Connects, pulls and closes again and again."""
        for _ in range(rounds):
            peer = self.engine.connect(address, timeout_s=30.0)
            self.cache.pull(reference, into=into).wait(60.0)
            peer.close()

    def fork(self, *, long: bool = False) -> int:
        """Forks a child that ends at once or lives on; returns its id, or the exit code of one that ended."""
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that hangs ends by this
            if long:
                signal.pause()
            self.forget()
            del self.cache, self.engine
            gc.collect()
            os._exit(0)
        return child if long else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def use_in_a_child(self, reference: str, into: list[int], address: str) -> list[str]:
        """Forks a child that tries to go on; returns what came of each try."""
        theirs, ours = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that hangs ends by this
            tries = {
                "pull": lambda: self.cache.pull(reference, into=into).wait(20),
                "connect": lambda: self.engine.connect(address, timeout_s=5),
                "export": lambda: self.cache.export(into),
                "close": self.engine.close,
            }
            for name, attempt in tries.items():
                try:
                    attempt()
                    said = f"{name}: went well"
                except pdkv.PdkvError as error:
                    said = f"{name}: {type(error).__name__}: {error.message} {error.hint}"
                os.write(ours, said.replace("\n", " ").encode() + b"\n")
            self.forget()
            del self.cache, self.engine
            gc.collect()
            os._exit(0)
        os.close(ours)
        with os.fdopen(theirs) as lines:
            said = lines.read().splitlines()
        return [*said, f"exit: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}"]

    def free_cache(self) -> None:
        """Deregisters the cache and drops its memory."""
        self.cache.deregister()
        del self.cache, self.words
        self.forget()

    # The process

    def forget(self) -> None:
        """Drops all handles on transfers, exports and peers."""
        self.transfers.clear()
        self.exports.clear()
        self.peers.clear()
        gc.collect()

    def stats(self) -> dict[str, int]:
        """The engine's counters."""
        return self.engine.stats

    def peer_names(self) -> list[str]:
        """Who is connected."""
        return [name for name, _ in self.engine.peers]

    def resources(self) -> dict[str, int]:
        """What the process holds of the system."""
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {
            "fds": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - counts, and holds one itself each time
            "threads": int(status["Threads"]),
            "rss_kib": int(status["VmRSS"].split()[0]),
            "mappings": Path("/proc/self/maps").read_text().count("memfd:"),
        }

    def listening(self) -> list[int]:
        """The TCP ports on which this process takes connections."""
        mine = set()
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the one that lists them is gone
                mine.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
        rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
        return sorted(int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in mine)

    def die_when(self, what: str) -> None:
        """Kills this process from within as soon as a claim is `claimed` here or a transfer is `moving`."""

        def watch() -> None:
            if what == "claimed":
                self.await_claim()
            while what == "moving" and all(transfer.state == "claiming" for transfer in list(self.transfers)):
                time.sleep(0.0001)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()

    def limit_descriptors(self, spare: int) -> None:
        """Leaves this process only so many more descriptors; called again, without letting go of any in between."""
        top, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Once: later there may be none to look with, even where no filler found room.
        if not self.limited:
            self.limited = True
            top = max(int(name) for name in os.listdir("/proc/self/fd")) + 1  # noqa: PTH208
            resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
        with suppress(OSError):
            while True:
                self.fillers.append(os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + spare, hard))

    def free_descriptors(self) -> None:
        """Lifts the limit again."""
        self.limited = False
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        while self.fillers:
            os.close(self.fillers.pop())

    def shut_down(self) -> tuple[bool, list[str]]:
        """Closes the engine in order; returns what it says of its memory, and what it logs."""
        logged = []
        log = logging.Handler(logging.WARNING)
        log.emit = lambda record: logged.append(record.getMessage())
        logging.getLogger("pdkv.engine").addHandler(log)
        return self.engine.close(), logged
