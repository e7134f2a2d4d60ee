"""One end of a lookup buffer in a process of its own, and what a test asks of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

import pdkv
from pdkv.lookup_buffer import LookupBuffer

SHAPE = (64, 2, 16, 64)  # blocks, heads, tokens, content
PATIENCE_S = 60.0


def ints(*tokens):
    return np.array(tokens, np.int64)


def until(true, what):
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.01)


class End:
    """An engine with a cache and a buffer: the producer's without an address, a consumer's with it."""

    def __init__(self, name, address=None, **settings):
        self.engine = pdkv.Engine(name, heartbeat_s=0.5, peer_timeout_s=20.0)
        self.pages = np.zeros(SHAPE, np.float32)
        self.cache = self.engine.register_kv_cache({"a": self.pages}, layout="BHNC", block_tokens=16)
        self.peer = None if address is None else self.engine.connect(address, timeout_s=PATIENCE_S)
        self.buffer = LookupBuffer(self.engine, self.peer, library="numpy", **settings)
        self.selections = []
        self.tickets = []

    def address(self):
        return self.engine.address

    def insert(self, *tokens, values=4, **options):
        self.buffer.insert(ints(*tokens), None, np.full(values, float(tokens[0])), None, None, **options)

    def insert_blocks(self, tokens, blocks, value):
        self.pages[blocks] = value
        self.tickets.append(self.buffer.insert_blocks(ints(*tokens), self.cache, blocks))

    def ticket(self, number, timeout_s=PATIENCE_S):
        return self.tickets[number].wait(timeout_s)

    def drop_select(self, *tokens, timeout_s=PATIENCE_S):
        """The tokens found and the first and last value of the key."""
        found = self.buffer.drop_select(ints(*tokens) if tokens else None, None, timeout_s=timeout_s)
        return found[0].tolist(), float(found[2][0]), float(found[2][-1])

    def drop_select_into(self, tokens, blocks):
        found = self.buffer.drop_select_into(ints(*tokens), self.cache, blocks, timeout_s=PATIENCE_S)
        return found.num_tokens, self.pages[blocks].min(), self.pages[blocks].max(), found.transfer.stats.staged_bytes

    def select(self, *tokens):
        self.selections.append(self.buffer.select(ints(*tokens) if tokens else None))

    def select_blocks(self, count):
        """Selects blocks and pulls nothing; returns when it has been told where they are."""
        self.selections.append(self.buffer._select(np.arange(count), None, blocks=True).start())
        return self.hit()

    def hit(self):
        """Waits for what the last select found, and takes nothing."""
        return self.selections[-1].hit(PATIENCE_S).matched

    def cancel(self):
        self.selections[-1].cancel()

    def peek(self, *tokens):
        return self.buffer.peek(ints(*tokens) if tokens else None)

    def waiting(self):
        return len(self.buffer), self.buffer.used_bytes

    def sessions(self):
        return len(self.buffer._sessions)

    def say(self, message, tensors=()):
        """Says something that is against the rules, to the producer or to all consumers."""
        ends = [self.buffer._remote] if self.buffer._remote else list(self.buffer._sessions)
        for end in ends:
            end._pipe.send_message(message, tensors)

    def greet(self, address, words):
        """Greets a producer with any words."""
        peer = self.engine.connect(address, timeout_s=PATIENCE_S)
        sender = peer.open_pipe(b"lookup:buffer/lookup:door")
        sender.send(words, None, (), (), 0, 0, None, PATIENCE_S)
        sender.close(PATIENCE_S)

    def greet_as(self, address, other):
        """Greets a producer with the address of another engine."""
        self.greet(address, b"g" + json.dumps({"version": 1, "address": other, "token": "0" * 16}).encode())

    def threads(self):
        return sorted(thread.name for thread in threading.enumerate())

    def close(self):
        self.buffer.close()
        self.engine.close()


def _serve(line, name, address, settings):
    end = End(name, address, **settings)
    with suppress(EOFError):
        while True:
            verb, arguments, options = line.recv()
            try:
                line.send((True, getattr(end, verb)(*arguments, **options)))
            except (pdkv.PdkvError, AssertionError) as error:
                line.send((False, error))
    os._exit(0)


class Far:
    """An `End` in another process: `do` calls a method of it."""

    def __init__(self, name, address=None, **settings):
        spawn = multiprocessing.get_context("spawn")
        self._line, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, name, address, settings), daemon=True)
        self._process.start()
        theirs.close()
        self._posted = 0

    def post(self, verb, *arguments, **options):
        self._line.send((verb, arguments, options))
        self._posted += 1

    def answer(self):
        assert self._line.poll(2 * PATIENCE_S), "the other process does not answer"
        good, result = self._line.recv()
        self._posted -= 1
        if not good:
            raise result
        return result

    def answers(self, *, all_of_them=False):
        """The answers to what was posted: all, or those that a process that is dead now had given."""
        found = []
        with suppress(EOFError, ConnectionResetError):
            while self._posted and (all_of_them or self._line.poll(0)):
                found.append(self.answer())
        return found

    def do(self, verb, *arguments, **options):
        self.post(verb, *arguments, **options)
        return self.answer()

    def signal(self, number):
        os.kill(self._process.pid, number)

    def stop(self):
        """Stops the process; returns when none of its threads runs any more."""
        self.signal(signal.SIGSTOP)
        until(self._is_stopped, "the stop")

    def _is_stopped(self):
        threads = Path(f"/proc/{self._process.pid}/task").iterdir()
        try:
            return all("(stopped)" in Path(thread, "status").read_text() for thread in threads)
        except (FileNotFoundError, ProcessLookupError):
            return False  # one was just ending

    def kill(self):
        self.signal(signal.SIGKILL)
        self._process.join(PATIENCE_S)

    def close(self):
        if self._process.is_alive():
            self.signal(signal.SIGKILL)
        self._process.join(PATIENCE_S)
        self._line.close()
