"""What a pipe is compared with: gloo's `send` and `recv`, and pickled tensors through a TCP store, as in `PyNcclPipe`.

Each has two processes of its own on this machine. One that cannot take part, because torch is not installed for
example, keeps its row and says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pdkv
from pdkv.bench import control
from pdkv.bench.mover import Mover
from pdkv.bench.pipe.exchange import Exchange, has_torch
from pdkv.errors import ConfigError, PdkvError, UnsupportedError

_NOT_INSTALLED = "not measured: torch is not installed"
# No module of pdkv unpickles; the program that does is beside the library and not in it.
_STORE_PROGRAM = Path(pdkv.__file__).resolve().parents[2] / "benches" / "pickled_store.py"


class Peer(Mover):
    """Another carrier: a source and a target, each a process that runs the same program."""

    kind = "peer"

    def __init__(self, name: str, program: Sequence[str], exchange: Exchange, timeout_s: float) -> None:
        """Starts both and connects them.

        Args:
            name: What the row says.
            program: Arguments of the interpreter.
            exchange: What is carried.
            timeout_s: How long a request may take.

        Raises:
            PdkvError: One did not start, or the carrier refuses.
        """
        self.name = name
        self._failure: PdkvError | None = None
        with ExitStack() as stack:
            self._source, self._target = (
                stack.enter_context(control.spawned(program, timeout_s, f"the `{name}` process of `{role}`"))
                for role in ("src", "dst")
            )
            plain = exchange.to_json()
            told = self._source.ask("open", exchange=plain, role="src")
            self._target.ask("open", exchange=plain, role="dst", address=told["address"])
            for end in (self._source, self._target):
                end.send({"do": "connect"})
            for end in (self._source, self._target):
                end.answer()
            self._stack = stack.pop_all()
        self.note, self._in_two_steps = str(told["note"]), told["in_two_steps"] is True

    def fill(self, stamp: int) -> None:
        """Lets both let go of what came before, and the source fill its tensors."""
        for end in (self._source, self._target):
            end.ask("forget")
        self._source.ask("fill", stamp=stamp)

    def run(self) -> float:
        """Lets the source send and the target receive; the clock stops when both are done."""
        started = time.perf_counter()
        for end, do in ((self._source, "send"), (self._target, "receive")):
            end.send({"do": do})
        # The source first: without it the target waits in vain, and what it met is what there is to say.
        try:
            for end in (self._source, self._target):
                end.answer()
        except PdkvError as error:
            self._failure = error
            raise
        seconds = time.perf_counter() - started
        if self._in_two_steps:
            proof = self._source.ask("prove")["proof"]
            seconds += float(str(self._target.ask("finish", proof=proof)["seconds"]))
        return seconds

    def count_wrong(self, stamp: int) -> int:
        """Lets the target check its tensors."""
        return int(str(self._target.ask("check", stamp=stamp)["wrong"]))

    def close(self) -> None:
        """Ends the processes; if one has failed they are killed, as the other may wait for it."""
        failure = self._failure
        self._stack.__exit__(type(failure) if failure else None, failure, None)


def _gloo(exchange: Exchange, timeout_s: float) -> Mover:
    return Peer("gloo send/recv", ["-m", "pdkv.bench.pipe.gloo_end"], exchange, timeout_s)


def _pickled(exchange: Exchange, timeout_s: float) -> Mover:
    if not _STORE_PROGRAM.is_file():
        raise UnsupportedError(
            "not measured: the program that pickles is `benches/pickled_store.py` of a checkout, and no part of pdkv"
        )
    return Peer("pickle over TCPStore", [str(_STORE_PROGRAM)], exchange, timeout_s)


PEERS: dict[str, tuple[str, Callable[[Exchange, float], Mover]]] = {
    "gloo": ("gloo send/recv", _gloo),
    "pickle": ("pickle over TCPStore", _pickled),
}
# So slow that measuring it beside the first transport is enough; what pdkv does meanwhile is nothing to it.
ONCE = ("pickle",)


def makers(
    asked: Sequence[str], exchange: Exchange, timeout_s: float, *, far: bool
) -> list[tuple[str, Callable[[], Mover]]]:
    """Gives the name of each peer that was asked for, and what starts it or says why it can't.

    Args:
        asked: Keys of `PEERS`.
        exchange: What is carried.
        timeout_s: How long a request may take.
        far: Whether pdkv's producer may be on another machine, where no process of ours can be started.

    Raises:
        ConfigError: There is no such peer.
    """
    if unknown := [name for name in asked if name not in PEERS]:
        raise ConfigError(f"`{unknown[0]}` carries no tensors here", hint=f"use {', '.join(PEERS)}")

    def start(make: Callable[[Exchange, float], Mover]) -> Mover:
        if not has_torch():
            raise UnsupportedError(_NOT_INSTALLED)
        if far:
            raise UnsupportedError("not measured: both ends of it would be on this machine")
        return make(exchange, timeout_s)

    return [(PEERS[name][0], lambda make=PEERS[name][1]: start(make)) for name in asked]  # type: ignore[misc]
