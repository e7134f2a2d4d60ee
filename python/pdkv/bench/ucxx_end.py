"""A process that moves a case's pages by the Python bindings of UCX named `ucxx`: the source or the target of them.

Run as a program by `ucxx_peer`, which drives it over a control channel. The bindings get a process of their own
because they change the environment when they are imported and bring a UCX of their own. They offer tagged
messages but neither put nor get, so each page is a message and both ends post all of them, in the order of
their tables. What can be prepared (buffers, tags) is prepared before the clock starts.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from pdkv.bench import control
from pdkv.bench.buffers import Pages
from pdkv.bench.cases import Case
from pdkv.bench.control import Message
from pdkv.bench.side import Toolkit
from pdkv.errors import ConfigError


class End:
    """One end: a pool, the bindings' worker, and its endpoint to the other end."""

    def __init__(self, kit: Toolkit, case: Case, role: str) -> None:
        """Allocates and touches the pool and makes the worker."""
        import ucxx
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array

        self._native, self._case, self._lib = kit.native, case, libucxx
        self._pages = Pages(case, None, where="private")
        self._sends = role == "src"
        self._ids = np.concatenate(case.tables(role))
        offsets = np.concatenate([self._pages.offsets(ids) for ids in case.tables(role)]).tolist()
        size, memory = case.page_bytes, self._pages.bytes
        self._buffers = [Array(memory[at : at + size]) for at in offsets]
        self._tags = [libucxx.UCXXTag(i) for i in range(len(offsets))]
        self._context = libucxx.UCXContext({}, feature_flags=(libucxx.Feature.TAG,))
        self._worker = libucxx.UCXWorker(self._context)
        self._endpoint: Any = None
        self.address: str = libucxx.UCXAddress.create_from_worker(self._worker).tobytes().hex()
        self.version = f"{ucxx.__version__}, UCX {'.'.join(map(str, libucxx.get_ucx_version()))}"

    def connect(self, address: str) -> None:
        """Makes the endpoint to the other end."""
        other = self._lib.UCXAddress.create_from_buffer(bytes.fromhex(address))
        self._endpoint = self._lib.UCXEndpoint.create_from_worker_address(self._worker, other, False)

    def fill(self, stamp: int) -> None:
        """Writes fresh bytes into the blocks of the table."""
        self._pages.fill(self._ids, stamp, self._native)

    def move(self) -> None:
        """Sends or receives every page once, a window of them at a time."""
        post = self._endpoint.tag_send if self._sends else self._endpoint.tag_recv
        window, worker = self._case.ucx.window, self._worker
        posted: deque[Any] = deque()
        for buffer, tag in zip(self._buffers, self._tags, strict=True):
            posted.append(post(buffer, tag))
            while len(posted) >= window:
                _advance(posted, worker)
        while posted:
            _advance(posted, worker)

    def count_wrong(self, stamp: int) -> int:
        """Checks every byte of the table's blocks; names the first wrong pages on stderr."""
        origins = np.concatenate(self._case.tables("src"))
        return self._pages.find_wrong(self._ids, origins, stamp, self._native).report(f"ucxx stamp {stamp}")


def _advance(posted: deque[Any], worker: Any) -> None:
    """Takes the oldest message off if it is done, and lets the worker go on if it isn't."""
    if posted[0].completed:
        posted.popleft().check_error()
    else:
        worker.progress()


class Server:
    """Answers the requests of the process that drives this one."""

    def __init__(self, kit: Toolkit) -> None:
        """Has no case yet."""
        self._kit = kit
        self._end: End | None = None
        self.handlers: dict[str, Callable[[Message], Message]] = {
            "open": self._open,
            "connect": self._connect,
            "fill": self._fill,
            "move": self._move,
            "check": self._check,
        }

    def _open(self, request: Message) -> Message:
        self._end = End(self._kit, Case.from_json(request["case"]), str(request["role"]))
        return {"address": self._end.address, "version": self._end.version}

    def _connect(self, request: Message) -> Message:
        self._opened.connect(str(request["address"]))
        return {}

    def _fill(self, request: Message) -> Message:
        self._opened.fill(int(str(request["stamp"])))
        return {}

    def _move(self, _: Message) -> Message:
        self._opened.move()
        return {}

    def _check(self, request: Message) -> Message:
        return {"wrong": self._opened.count_wrong(int(str(request["stamp"])))}

    @property
    def _opened(self) -> End:
        if self._end is None:
            raise ConfigError("no case is open")
        return self._end


def main() -> NoReturn:
    """Serves the one process that started this one."""
    token, channel = control.greet()
    control.serve(channel, token, Server(Toolkit.real()).handlers)
    # The bindings' destructors close the endpoint and may wait for ever for the other end, which has left too.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
