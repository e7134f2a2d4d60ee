"""A stand-in for the library: engines that copy inside one process, and can be told to misbehave once."""

from __future__ import annotations

import ctypes
import itertools
import json
import queue
import socket
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np

from bench import fake_lookup
from pdkv.bench import pattern
from pdkv.bench.side import Toolkit
from pdkv.errors import TransferError, TransferTimeoutError


class World:
    """All engines of a test and what they know. `fault` happens in the transfer of that number (from 0).

    `flip` changes a bit of the last page, `skip` leaves the first page out, `spill` writes outside the table,
    `fail` raises.
    """

    def __init__(self, fault="", transfer=0, path="shm", staged=0):
        self.fault, self.transfer, self.path, self.staged = fault, transfer, path, staged
        self.numbers = itertools.count()
        self.known = {}
        self.open_engines = 0
        self.sent = queue.SimpleQueue()
        self.open_buffers = 0
        self.buffers = fake_lookup.buffers(self)

    @property
    def kit(self):
        def engine(name, **options):
            return Engine(self, name, options.get("transports"))

        return Toolkit(
            SimpleNamespace(
                Engine=engine,
                LookupBuffer=self.buffers,
                Pipe=Pipe,
                Reference=Text,
                RegionDescriptor=Text,
                UcxConfig=dict,
            ),
            Native(),
        )

    def remember(self, value):
        key = f"k{len(self.known)}"
        self.known[key] = value
        return Text(json.dumps({"key": key}))

    def find(self, text):
        return self.known[text.value["key"]]

    def move(self, pairs, outside=None):
        """Copies (destination, source) pairs."""
        fault = self.fault if next(self.numbers) == self.transfer else ""
        if fault == "fail":
            raise TransferError("made to fail", hint="none")
        started = time.perf_counter()
        for destination, source in pairs[fault == "skip" :]:
            destination[...] = source
        if fault == "flip":
            pairs[-1][0].reshape(-1).view(np.uint8)[3] ^= 0x40
        if fault == "spill":
            outside[...] ^= 1
        return Transfer(self, len(pairs), (time.perf_counter() - started) * 1e6)


class Text:
    """A reference or a descriptor: JSON in, JSON out."""

    def __init__(self, text):
        self.text, self.value = text, json.loads(text)

    @classmethod
    def from_json(cls, text):
        return cls(text)

    def to_json(self):
        return self.text


class Path(str):
    """The name of a transport, and what it rides on."""

    detail = "put/get by hand"


class Transfer:
    def __init__(self, world, runs, spent):
        self.path = Path(world.path)
        self.stats = SimpleNamespace(
            plan_us=1.0, post_us=2.0, wire_us=spent, handover_us=3.0, staged_bytes=world.staged, runs=runs
        )

    def wait(self, timeout_s=None):
        assert timeout_s is None or timeout_s > 0


class Engine:
    def __init__(self, world, name, transports):
        self.world, self.name, self.address = world, name, f"fake:{name}"
        self.transports = transports
        world.open_engines += 1
        self.closed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        if not self.closed:
            self.closed = True
            self.world.open_engines -= 1

    def allocate(self, nbytes):
        return bytearray(nbytes)

    def register(self, memory, adopt=False):
        descriptor = self.world.remember(memory)
        return SimpleNamespace(memory=memory, describe=lambda: descriptor)

    def register_kv_cache(self, tensors, layout, block_tokens, model, adopt):
        assert layout == "BHNC"
        assert all(tensor.shape[2] == block_tokens for tensor in tensors.values())
        return Cache(self.world, list(tensors.values()))

    def connect(self, address, timeout_s):
        return Peer(self.world)


class Cache:
    def __init__(self, world, tensors):
        self.world, self.tensors = world, tensors

    def export(self, ids, num_tokens, lease_s, consumers=1):
        return SimpleNamespace(reference=self.world.remember((self, ids)), release=lambda: None)

    offer = export

    def _between(self, source, source_ids, destination, destination_ids):
        pairs = [
            (destination.tensors[layer][d], source.tensors[layer][s])
            for layer in range(len(self.tensors))
            for d, s in zip(destination_ids.tolist(), source_ids.tolist(), strict=True)
        ]
        blocks = destination.tensors[0].shape[0]
        outside = next((i for i in range(blocks) if i not in set(destination_ids.tolist())), None)
        return self.world.move(pairs, None if outside is None else destination.tensors[0][outside])

    def pull(self, reference, into, timeout_s=None, require=None):
        source, ids = self.world.find(reference)
        return self._between(source, ids, self, into)

    def push(self, offer, block_ids, timeout_s=None, require=None):
        destination, ids = self.world.find(offer)
        return self._between(self, block_ids, destination, ids)


class Peer:
    def __init__(self, world):
        self.world = world

    def _views(self, end):
        holder, spans = end
        memory = self.world.find(holder) if isinstance(holder, Text) else holder.memory
        return [memory[at : at + length] for at, length in spans.tolist()]

    def read(self, dst, src, timeout_s=None, require=None):
        return self.world.move(list(zip(self._views(dst), self._views(src), strict=True)))

    write = read

    def close(self):
        pass


class Pipe:
    """A queue of copies. `fault` happens to the tensor of that number: `flip`, `cast`, `fail`, `swap` with the next."""

    def __init__(self, engine, peer, channel, library=None):
        self.world, self.held = engine.world, None
        self.path = Path(engine.transports[0] if engine.world.path == "shm" else engine.world.path)
        self.stats = dict.fromkeys(("items", "bytes", "inline_bytes", "direct_bytes", "staged_bytes"), 0)

    def send_tensor(self, tensor, timeout_s=None):
        world = self.world
        fault = world.fault if next(world.numbers) == world.transfer else ""
        if fault == "fail":
            world.sent.put(None)
            raise TransferError("made to fail", hint="none")
        sent = tensor.copy()
        if fault == "flip":
            sent.reshape(-1).view(np.uint8)[3] ^= 0x40
        if fault == "cast":
            sent = sent.view(np.int8)
        small = "inline_bytes" if sent.nbytes <= 65536 else "direct_bytes"
        for name in ("bytes", small):
            self.stats = {**self.stats, name: self.stats[name] + sent.nbytes}
        self.stats = {**self.stats, "staged_bytes": self.stats["staged_bytes"] + world.staged}
        if fault == "swap":
            self.held = sent
            return
        world.sent.put(sent)
        if self.held is not None:
            world.sent.put(self.held)
            self.held = None

    def recv_tensor(self, timeout_s=None):
        with suppress(queue.Empty):
            if (came := self.world.sent.get(timeout=60)) is not None:
                return came
        raise TransferTimeoutError("nothing came", hint="none")

    def flush(self, timeout_s=None):
        pass

    def abort(self):
        pass


class Native:
    """The native helpers, in Python; addresses are of this process."""

    LookupIndex = fake_lookup.Index

    def pattern_fill(self, address, offsets, page_bytes, keys, threads):
        pattern.fill(_memory(address, offsets, page_bytes), offsets, page_bytes, keys, None, threads)

    def pattern_verify(self, address, offsets, page_bytes, keys, threads):
        memory = _memory(address, offsets, page_bytes)
        return [
            i
            for i, (at, key) in enumerate(zip(offsets.tolist(), keys.tolist(), strict=True))
            if not np.array_equal(memory[at : at + page_bytes], pattern.page(key, page_bytes))
        ]

    def limit_copy(self, dst, src, dst_offsets, src_offsets, block_bytes, threads):
        started = time.perf_counter()
        for d, s in zip(dst_offsets.tolist(), src_offsets.tolist(), strict=True):
            ctypes.memmove(dst + d, src + s, block_bytes)
        return time.perf_counter() - started

    def limit_cma(self, pid, dst, src, dst_offsets, src_offsets, block_bytes, threads):
        return self.limit_copy(dst, src, dst_offsets, src_offsets, block_bytes, threads)

    def limit_tcp_send(self, fds, address, offsets, block_bytes):
        return self._stream(fds, address, offsets, block_bytes, socket.socket.sendall)

    def limit_tcp_recv(self, fds, address, offsets, block_bytes):
        def receive(sock, view):
            while view:
                view = view[sock.recv_into(view) :]

        return self._stream(fds, address, offsets, block_bytes, receive)

    class UcxLoop:
        """Both ends are in this process: a loop copies."""

        version = "1.2.3"
        open = 0
        refusal = None

        def __init__(self, memory, library, wheels, settings):
            if self.refusal is not None:
                raise self.refusal
            Native.UcxLoop.open += 1
            self.memory, self.closed = memory, False
            assert dict(settings) == {"TLS": "tcp"}

        def describe(self):
            return b"worker", b"key", self.memory.ctypes.data, self.memory.nbytes

        def connect(self, worker, key, base, length):
            assert (worker, key) == (b"worker", b"key")
            self.base, self.length = base, length

        def run(self, verb, local, remote, block_bytes, window):
            assert window == 7
            started = time.perf_counter()
            for here, there in zip(local.tolist(), remote.tolist(), strict=True):
                assert there + block_bytes <= self.length
                ends = (self.memory.ctypes.data + here, self.base + there)
                ctypes.memmove(*(ends if verb == "get" else ends[::-1]), block_bytes)
            return time.perf_counter() - started

        def close(self):
            if not self.closed:
                Native.UcxLoop.open -= 1
                self.closed = True

    def _stream(self, fds, address, offsets, block_bytes, move):
        started = time.perf_counter()
        for fd, share in zip(fds, np.array_split(offsets, len(fds)), strict=True):
            sock = socket.socket(fileno=fd)
            try:
                for at in share.tolist():
                    move(sock, memoryview(_memory(address + at, [0], block_bytes)))
            finally:
                sock.detach()
        return time.perf_counter() - started


def _memory(address, offsets, page_bytes):
    size = int(max(offsets, default=0)) + page_bytes
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
