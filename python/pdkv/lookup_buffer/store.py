"""`KVStore`: tensors under names, kept by the process that put them and got by any that is connected to it.

The store-flavoured face of vLLM 0.8 (`KVStoreBufferBase`): `put` and `get`, neither of which waits for the other. It is
a cache: when it is full, what was used least recently goes. Nothing is written anywhere and nothing is replicated.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from pdkv.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    IntegrityError,
    PdkvError,
    PeerError,
    TransferCancelledError,
    UnsupportedError,
)
from pdkv.lookup_buffer.calm import calmly
from pdkv.lookup_buffer.link import Door, check_name, reach
from pdkv.lookup_buffer.remote import Remote
from pdkv.lookup_buffer.server import MessagePipe
from pdkv.lookup_buffer.tensors import nbytes_of
from pdkv.lookup_buffer.words import Kind, Word, pack, refusal, unpack

if TYPE_CHECKING:
    from types import TracebackType

    from pdkv.engine import Engine, Peer

__all__ = ["KVStore"]

_log = logging.getLogger("pdkv.lookup")
_MAX_KEY_BYTES = 1024
# What may wait to be sent to one peer; its thread waits, and nobody else.
_PEER_BYTES = 1_000_000_000


class KVStore:
    """Tensors by name: this process's own, and through `peers` those of others.

    All methods may be called from any number of threads.

    Args:
        engine: This process's; without one the store is this process's alone.
        peers: Connections to the engines of other stores, asked in this order.
        name: Which store of an engine this is; all ends give the same.
        max_bytes: How many bytes are kept before the least recently used go.
        device: Where tensors land that come from peers.
        library: What they are: `"torch"`, `"numpy"`, or `None` for torch where it is installed.
        timeout_s: How long a peer may take to connect.

    Raises:
        ConfigError: A setting can't be.
        HandshakeError: A peer has no such store, or can't reach this engine.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        peers: Sequence[Peer] = (),
        *,
        name: str = "store",
        max_bytes: float = 1_000_000_000,
        device: str | None = None,
        library: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        check_name(name)
        if not max_bytes > 0 or (peers and engine is None):
            raise ConfigError(
                f"`max_bytes` is `{max_bytes}`, `name` is `{name}`, `engine` is `{engine}`", operation="store"
            )
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._values = OrderedDict[str, tuple[Any, int]]()
        self._used = 0
        self._closed = False
        self._pipes = set[MessagePipe]()
        self._remotes: list[Remote] = []
        self._engine, self._name, self._timeout_s = engine, f"store/{name}", timeout_s
        self._device, self._library = device, library
        self._door: Door | None = None
        if engine is None:
            return
        self._door = Door(engine, self._name, self._serve, buffer_bytes=_PEER_BYTES)
        try:
            for peer in peers:
                self.add_peer(peer)
        except BaseException:
            self.close()
            raise

    def add_peer(self, peer: Peer) -> None:
        """Connects to one more store, which is asked after those that are connected.

        Raises:
            ConfigError: This store has no engine.
            HandshakeError: The peer has no such store, or can't reach this engine.
        """
        if self._engine is None:
            raise ConfigError("a store without an engine has no peers", operation="store")
        pipe = reach(
            self._engine,
            peer,
            self._name,
            device=self._device,
            library=self._library,
            timeout_s=self._timeout_s,
        )
        self._remotes.append(Remote(pipe, peer.name))

    def put(self, key: str, value: Any | None) -> None:
        """Keeps a tensor under a name, in place of what had it before.

        The tensor is kept, not copied: it must not change while it is in the store. What no longer fits goes, the
        least recently used first.

        Args:
            key: The name, up to 1 KiB.
            value: The tensor. `None` does nothing, as in vLLM's `MooncakeStore`.

        Raises:
            CapacityError: The tensor is larger than the whole store.
            LayoutError: It is no tensor.
            ClosedError: The store was closed.
        """
        _encode(key, "put")
        if value is None:
            return
        nbytes = nbytes_of(value, "put")
        if nbytes > self.max_bytes:
            raise CapacityError(
                f"`{key}` has `{nbytes}` bytes and can never fit into a store of `{self.max_bytes:.0f}`",
                operation="put",
                retryable=False,
                hint="make the store with a larger `max_bytes`",
            )
        calmly(self._keep, key, value, nbytes)

    def _keep(self, key: str, value: Any, nbytes: int) -> None:
        with self._lock:
            self._check("put")
            self._forget(key)
            while self._used + nbytes > self.max_bytes:
                self._forget(next(iter(self._values)))
            self._values[key] = (value, nbytes)
            self._used += nbytes

    def get(self, key: str, timeout_s: float | None = None) -> Any | None:
        """Returns the tensor under a name, which stays there.

        One of this store is the very tensor that was put; one of a peer's has memory of its own.

        Args:
            key: The name.
            timeout_s: How long the peers may take to answer, all together; `None` waits as long as they live.

        Returns:
            The tensor, or `None` if neither this store nor a peer has it. A peer that is gone has nothing.

        Raises:
            TransferTimeoutError: A peer did not answer in time.
            UnsupportedError: A tensor of a dtype that this end's library does not have.
            ClosedError: The store was closed.
        """
        name = _encode(key, "get")
        found = self._own(key, "get")
        if found is not None:
            return found
        for word, tensors in self._ask(Kind.GET, name, timeout_s):
            if word.kind is Kind.HIT and len(tensors) == 1:
                return tensors[0]
        return None

    def exists(self, key: str, timeout_s: float | None = None) -> bool:
        """Whether `get` would find something; arguments and errors as there."""
        name = _encode(key, "exists")
        if self._own(key, "exists") is not None:
            return True
        return any(word.kind is Kind.HIT for word, _ in self._ask(Kind.EXISTS, name, timeout_s))

    def remove(self, key: str) -> bool:
        """Removes what this store keeps under a name; says whether there was anything. Peers keep theirs."""
        return calmly(self._remove, key)

    def _remove(self, key: str) -> bool:
        with self._lock:
            self._check("remove")
            return self._forget(key)

    @property
    def used_bytes(self) -> int:
        """Bytes of the tensors that this store keeps."""
        return self._used

    def __len__(self) -> int:
        """How many tensors this store keeps."""
        return len(self._values)

    def close(self) -> None:
        """Drops everything and leaves the peers. Doing it twice is no error."""
        with self._lock:
            self._closed = True
            self._values.clear()
            self._used = 0
            pipes = list(self._pipes)
        for remote in self._remotes:
            remote.close()
        if self._door is not None:
            self._door.close()
            for pipe in pipes:
                pipe.abort()
            self._door.join(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def _own(self, key: str, operation: str) -> Any | None:
        with self._lock:
            self._check(operation)
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def _forget(self, key: str) -> bool:
        gone = self._values.pop(key, None)
        if gone is not None:
            self._used -= gone[1]
        return gone is not None

    def _check(self, operation: str) -> None:
        if self._closed:
            raise ClosedError("the store was closed", operation=operation)

    def _ask(self, kind: Kind, name: bytes, timeout_s: float | None) -> Any:
        """The answers of the peers, each asked when the one before was of no use."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for remote in self._remotes:
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                yield remote.call(kind, None, 0, name, left)
            except PdkvError as error:
                if remote.alive and not isinstance(error, (PeerError, ClosedError)):
                    raise
                self._check(kind.name.lower())  # closed here is an error, a peer that is gone has nothing
                _log.debug("a store is gone: %s", error.message)

    def _serve(self, pipe: MessagePipe, peer: str) -> None:
        with self._lock:
            if self._closed:
                pipe.abort()
            self._pipes.add(pipe)
        try:
            while True:
                tag, tensors = pipe.recv_message()
                word = unpack(tag)
                if word.kind not in (Kind.GET, Kind.EXISTS) or tensors or len(word.tail) > _MAX_KEY_BYTES:
                    raise IntegrityError(f"a store was told `{word.kind.name}`", operation="store")
                found = self._own(word.tail.decode(errors="replace"), "get")
                answer = Word(Kind.MISS if found is None else Kind.HIT, word.request)
                try:
                    pipe.send_message(pack(answer), [] if found is None or word.kind is Kind.EXISTS else [found])
                except UnsupportedError as error:  # a tensor that can't be sent is no fault of who asked
                    pipe.send_message(pack(refusal(word.request, error)))
        except (PeerError, ClosedError, TransferCancelledError) as error:
            _log.debug("`%s` left: %s", peer, error.message)
        except PdkvError as error:
            _log.warning("`%s` is cut off: %s", peer, error.message)
        finally:
            pipe.abort()
            with self._lock:
                self._pipes.discard(pipe)


def _encode(key: str, operation: str) -> bytes:
    name = key.encode()
    if len(name) > _MAX_KEY_BYTES:
        raise ConfigError(f"a key of `{len(name)}` bytes, at most `{_MAX_KEY_BYTES}` are possible", operation=operation)
    return name
