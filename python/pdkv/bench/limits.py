"""The limit rows: the smallest loop that moves the same pages the same way, measured in the same run.

- `shm`, `inproc`: a plain scattered copy inside the consumer, same threads.
- `cma`: `process_vm_readv` of the producer's pages, 1,024 spans a call, same threads.
- `tcp`: `sendmsg` here, `readv` there, same number of streams, no framing.
- `cuda`: one copy of as many bytes within the GPU by its driver.

Each fills its source with fresh bytes before and is checked after, like the row it limits. `Rival` is what
all rows beside pdkv's are measured through, those of other programs too.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import numpy as np

from pdkv.bench import control
from pdkv.bench.buffers import Pages
from pdkv.bench.control import Channel
from pdkv.bench.mover import Mover
from pdkv.bench.pattern import U64
from pdkv.bench.side import Side
from pdkv.errors import PeerLostError, UnsupportedError


class Rival(Mover):
    """Something else that moves a case's pages, measured in turn with pdkv."""

    kind = "limit"

    def __init__(self, side: Side, producer: Channel) -> None:
        """Takes the consumer's side and the way to the producer."""
        self.side, self.producer = side, producer

    def fill(self, stamp: int) -> None:
        """Writes fresh bytes where `run` reads them: by default the producer's pages."""
        self.producer.ask("fill", stamp=stamp)

    def count_wrong(self, stamp: int) -> int:
        """Checks what `run` moved, by default into the consumer's pages; names the first wrong pages on stderr."""
        return self.side.find_wrong(stamp).report(f"{self.name} stamp {stamp}")


def limit_for(path: str, native: Any, side: Side, producer: Channel, opened: control.Message) -> Rival | None:
    """Chooses the limit for the path that pdkv took; `None` where there is none to compare with."""
    if side.case.where == "cuda":
        return DeviceLimit(native, side, producer) if path in ("cuda", "inproc") else None
    if path in ("shm", "inproc"):
        return CopyLimit(native, side, producer)
    if path == "cma":
        return CmaLimit(native, side, producer, opened)
    if path == "tcp":
        return StreamLimit(native, side, producer)
    return None


def source_offsets(side: Side) -> U64:
    """Gives where the producer's pages lie, in the order of the consumer's."""
    return np.concatenate([side.pages.offsets(ids) for ids in side.case.tables("src")])


def target_offsets(side: Side) -> U64:
    """Gives where the consumer's pages lie, request by request."""
    return np.concatenate([side.pages.offsets(ids) for ids in side.tables])


class CopyLimit(Rival):
    """Copies from a second pool of this process, of the same kind of memory."""

    name = "scattered copy"

    def __init__(self, native: Any, side: Side, producer: Channel) -> None:
        """Allocates the second pool."""
        super().__init__(side, producer)
        self._native = native
        self._source = Pages(side.case, side.engine)
        self._ids = np.concatenate(side.case.tables("src"))
        self._offsets = (target_offsets(side), source_offsets(side))

    def fill(self, stamp: int) -> None:
        """Fills the second pool as the producer would fill its own."""
        self._source.fill(self._ids, stamp, self._native)

    def run(self) -> float:
        """Copies."""
        case = self.side.case
        to, since = self._offsets
        seconds: float = self._native.limit_copy(
            self.side.pages.address, self._source.address, to, since, case.page_bytes, case.threads
        )
        return seconds


class CmaLimit(Rival):
    """Reads the producer's pages with the system call alone."""

    name = "process_vm_readv"

    def __init__(self, native: Any, side: Side, producer: Channel, opened: control.Message) -> None:
        """Takes the producer's process id and address from its answer to `open`."""
        super().__init__(side, producer)
        self._native = native
        self._pid, self._pool = int(str(opened["pid"])), int(str(opened["pool"]))
        self._offsets = (target_offsets(side), source_offsets(side))

    def run(self) -> float:
        """Reads."""
        case = self.side.case
        to, since = self._offsets
        seconds: float = self._native.limit_cma(
            self._pid, self.side.pages.address, self._pool, to, since, case.page_bytes, case.threads
        )
        return seconds


class DeviceLimit(Rival):
    """Copies as many bytes in one piece within the consumer's GPU."""

    name = "device copy"
    checked = False
    note = "one contiguous copy of as many bytes, which are not checked"

    def __init__(self, native: Any, side: Side, producer: Channel) -> None:
        """Allocates both ends of it."""
        super().__init__(side, producer)
        self._pools = [side.engine.allocate(side.case.total_bytes, device="cuda") for _ in range(2)]
        self._loop = native.CudaLoop(self._pools[0].device)

    def fill(self, stamp: int) -> None:
        """Has nothing to fill: any bytes do."""

    def run(self) -> float:
        """Copies."""
        seconds: float = self._loop.whole(*(pool.address for pool in self._pools), self.side.case.total_bytes, 1)
        return seconds


class StreamLimit(Rival):
    """Receives the pages over plain TCP streams, scattering into place."""

    name = "sendmsg + readv"

    def __init__(self, native: Any, side: Side, producer: Channel) -> None:
        """Opens the streams."""
        super().__init__(side, producer)
        self._native = native
        self._offsets = target_offsets(side)
        self._sockets: list[socket.socket] = []
        answer = producer.ask("streams", count=side.case.streams)
        for _ in range(side.case.streams):
            sock = socket.create_connection(control.split_address(str(answer["address"])), timeout=10.0)
            sock.settimeout(None)
            self._sockets.append(sock)

    def run(self) -> float:
        """Receives; the clock starts with the request, as it does for pdkv."""
        self.producer.send({"do": "send"})
        seconds: float = self._native.limit_tcp_recv(
            [sock.fileno() for sock in self._sockets],
            self.side.pages.address,
            self._offsets,
            self.side.case.page_bytes,
        )
        self.producer.answer()
        return seconds

    def close(self) -> None:
        """Closes the streams."""
        for sock in self._sockets:
            sock.close()


class StreamSource:
    """The producer's end of `StreamLimit`."""

    def __init__(self, native: Any, side: Side, listen_host: str, count: int) -> None:
        """Listens for `count` streams; they are accepted at the first `send`."""
        if count > 64:
            raise UnsupportedError(f"`{count}` streams are more than 64")
        self._native, self._side, self._count = native, side, count
        self._offsets = source_offsets(side)
        self._listener = control.listen(control.join_address(listen_host, 0))
        self._listener.settimeout(10.0)
        self._sockets: list[socket.socket] = []
        self.address = control.join_address(*self._listener.getsockname()[:2])

    def send(self) -> float:
        """Sends all pages once.

        Raises:
            PeerLostError: The consumer did not open its streams.
        """
        while len(self._sockets) < self._count:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError as error:
                raise PeerLostError("the consumer did not open its streams") from error
            sock.settimeout(None)
            self._sockets.append(sock)
        seconds: float = self._native.limit_tcp_send(
            [sock.fileno() for sock in self._sockets],
            self._side.pages.address,
            self._offsets,
            self._side.case.page_bytes,
        )
        return seconds

    def close(self) -> None:
        """Closes the streams."""
        for sock in (*self._sockets, self._listener):
            with suppress(OSError):
                sock.close()
