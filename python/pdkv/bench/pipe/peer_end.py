"""One of the two processes of another carrier of tensors: the source or the target of an exchange.

What carries is given by the program that calls `main`: `gloo_end`, or one outside of this package. `peers` drives it
over a control channel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from pdkv.bench import control
from pdkv.bench.control import Message
from pdkv.bench.pipe import tensors
from pdkv.bench.pipe.exchange import Exchange
from pdkv.bench.pipe.tensors import Tensors
from pdkv.errors import ConfigError, UnsupportedError


class Carrier:
    """One end of something that carries tensors.

    Attributes:
        name: What the row says.
        note: What a reader of the row must know beside that.
        address: Where the target finds the source; the source is made first.
        in_two_steps: Whether `receive` gives something that `check` and `finish` are wanted for.
    """

    name = ""
    note = ""
    address = ""
    in_two_steps = False

    def connect(self) -> None:
        """Meets the other end, which does the same now."""

    def send(self, sent: Sequence[Any]) -> None:
        """Sends the tensors, at the source."""
        raise UnsupportedError(f"`{self.name}` sends no `{len(sent)}` tensors")

    def receive(self, landing: Sequence[Any]) -> Sequence[Any]:
        """Receives as many, at the target, into `landing` or into memory of its own."""
        raise UnsupportedError(f"`{self.name}` receives no `{len(landing)}` tensors")

    def prove(self) -> str:
        """Gives what the target's `check` wants, at the source."""
        return ""

    def check(self, received: Sequence[Any], proof: str) -> None:
        """Refuses what the source did not send, before `finish`; the time of it does not count."""

    def finish(self, received: Sequence[Any]) -> Sequence[Any]:
        """Makes tensors of what `receive` gave, at the target; the time of it counts."""
        return received

    def forget(self) -> None:
        """Lets go of what the last exchange left behind, at both ends; the time of it does not count."""


# Makes the end of a role (`src` or `dst`) for an exchange; the target gets the source's address, the source none.
Make = Callable[[Exchange, str, str], Carrier]


class End:
    """Answers requests about one end of one exchange."""

    def __init__(self, native: Any, make: Make) -> None:
        """Has nothing to carry yet."""
        self._native, self._make = native, make
        self._tensors: Tensors | None = None
        self._carrier: Carrier | None = None
        self._received: Sequence[Any] = []
        self.handlers: dict[str, Callable[[Message], Message]] = {
            "open": self._open,
            "connect": self._connect,
            "fill": self._fill,
            "forget": self._forget,
            "send": self._send,
            "receive": self._receive,
            "prove": self._prove,
            "finish": self._finish,
            "check": self._check,
        }

    def _open(self, request: Message) -> Message:
        exchange = Exchange.from_json(request["exchange"])
        self._tensors = Tensors(exchange, self._native)
        self._carrier = self._make(exchange, str(request["role"]), str(request.get("address", "")))
        made = self._carrier
        return {"address": made.address, "note": made.note, "in_two_steps": made.in_two_steps}

    def _connect(self, _: Message) -> Message:
        self._ready[0].connect()
        return {}

    def _fill(self, request: Message) -> Message:
        self._ready[1].fill(int(str(request["stamp"])))
        return {}

    def _forget(self, _: Message) -> Message:
        self._received = []
        self._ready[0].forget()
        return {}

    def _send(self, _: Message) -> Message:
        carrier, made = self._ready
        carrier.send(made.all)
        return {}

    def _receive(self, _: Message) -> Message:
        carrier, made = self._ready
        self._received = carrier.receive(made.all)
        return {}

    def _prove(self, _: Message) -> Message:
        return {"proof": self._ready[0].prove()}

    def _finish(self, request: Message) -> Message:
        carrier = self._ready[0]
        carrier.check(self._received, str(request["proof"]))
        started = time.perf_counter()
        self._received = carrier.finish(self._received)
        return {"seconds": time.perf_counter() - started}

    def _check(self, request: Message) -> Message:
        carrier, made = self._ready
        stamp = int(str(request["stamp"]))
        what = f"{carrier.name} stamp {stamp}"
        return {"wrong": tensors.count_wrong(self._received, made.exchange, stamp, self._native, what)}

    @property
    def _ready(self) -> tuple[Carrier, Tensors]:
        if self._carrier is None or self._tensors is None:
            raise ConfigError("no exchange is open")
        return self._carrier, self._tensors


def main(make: Make) -> None:
    """Serves the one process that started this one."""
    from pdkv import _core

    token, channel = control.greet()
    control.serve(channel, token, End(_core, make).handlers)
