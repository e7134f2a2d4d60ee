"""`LookupBuffer`: entries are inserted at one end and selected, by their tokens, at that end or at others.

This module is the face: which end one is, what the arguments are, and what belongs together. Order and waiting are the
shelf's, words and pipes the session's and the remote's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from pdkv.errors import ConfigError, TransferTimeoutError, UnsupportedError
from pdkv.lookup_buffer.blocks import BlockEntry, BlockMatch, BlockTicket, needed_blocks, pull
from pdkv.lookup_buffer.entry import Entry
from pdkv.lookup_buffer.link import Door, check_name, reach
from pdkv.lookup_buffer.local import ask
from pdkv.lookup_buffer.remote import Remote
from pdkv.lookup_buffer.room import Room
from pdkv.lookup_buffer.selection import Selection
from pdkv.lookup_buffer.server import Session
from pdkv.lookup_buffer.shelf import Shelf
from pdkv.lookup_buffer.tensors import keys_of

if TYPE_CHECKING:
    from types import TracebackType

    from pdkv.engine import Engine, KvCache, Peer
    from pdkv.pipe import Pipe

__all__ = ["LookupBuffer"]

_MATCHES = ("either_prefix", "longest_prefix")
# How long close() waits for consumers to hear of it.
_GOODBYE_S = 5.0


class LookupBuffer:
    """KV of prompts, found by the prompts' tokens: `insert` at the producer, `drop_select` at the consumers.

    A producer gives its engine, and its consumers come over the network by themselves; without an engine the buffer is
    this process's own. A consumer gives its engine and its connection to the producer's. Both may be in one process,
    and all methods may be called from any number of threads.

    An entry matches when its tokens are a prefix of those asked for or the other way round, tokens outside either
    side's `roi` left out; nothing matches no tokens. Entries are given out first in, first out, in a circle: those that
    were passed over stand behind the newest afterwards, as in vLLM 0.8's `SimpleBuffer`.

    An entry leaves the buffer when a consumer says that it has all of it. One whose consumer dies, times out or
    cancels before that goes back to its place.

    Args:
        engine: This end's engine.
        peer: The consumer's connection to the producer's engine; a producer gives none.
        name: Which of the producer's buffers this is; both ends give the same.
        match: `either_prefix` finds the first match in the order, `longest_prefix` the one with the most tokens in
            common, of several such the first.
        max_bytes: How many bytes of tensors the producer's end holds before `insert` blocks. Blocks of a cache do not
            count: they lie in the cache.
        hold_s: How long a consumer may neither take nor give back an entry that it was sent; then it is cut off.
        device: Where tensors land that a consumer receives.
        library: What they are: `"torch"`, `"numpy"`, or `None` for torch where it is installed.
        timeout_s: How long a consumer waits for the producer's answer when it connects or peeks.

    Raises:
        ConfigError: A setting can't be.
        HandshakeError: The producer has no such buffer, or can't reach this engine.
        PeerLostError: The producer is gone.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        peer: Peer | None = None,
        *,
        name: str = "lookup",
        match: str = "either_prefix",
        max_bytes: float = 1_000_000_000,
        hold_s: float = 300.0,
        device: str | None = None,
        library: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._longest = _is_longest(match)
        if peer is not None and engine is None:
            text = "there is a `peer` and no `engine`"
            raise ConfigError(text, operation="lookup", hint="give the engine that connected to the peer")
        if not hold_s > 0:
            raise ConfigError(f"`hold_s` is `{hold_s}`", operation="lookup", hint="give a positive number of seconds")
        check_name(name)
        self._engine, self._peer, self._hold_s, self._timeout_s = engine, peer, hold_s, timeout_s
        self._room = Room(max_bytes)
        self._shelves = {False: Shelf(self._room), True: Shelf(self._room)}
        self._sessions = set[Session]()
        self._remote: Remote | None = None
        self._door: Door | None = None
        if engine is not None and peer is not None:
            pipe = reach(engine, peer, f"buffer/{name}", device=device, library=library, timeout_s=timeout_s)
            self._remote = Remote(pipe, peer.name)
        elif engine is not None:
            # What a consumer was sent and has not answered is in the buffer; an honest one has no more coming.
            self._door = Door(engine, f"buffer/{name}", self._serve, buffer_bytes=max(1, int(min(max_bytes, 1 << 62))))

    # The producer's side

    def insert(
        self,
        tokens: Any | None,
        roi: Any | None,
        key: Any | None,
        value: Any | None,
        hidden: Any | None,
        timeout_s: float | None = None,
    ) -> None:
        """Adds an entry; blocks while there is no room for it.

        The tensors are kept, not copied: they must not change until the entry was selected or dropped.

        Args:
            tokens: [n] integers. `None`: only a request for anything finds the entry.
            roi: [n] which tokens count; `None` for all.
            key: Any tensor, or `None`.
            value: Any tensor, or `None`.
            hidden: Any tensor, or `None`.
            timeout_s: How long to wait for room; `None` waits for it as long as the buffer is open.

        Raises:
            CapacityError: The entry is larger than the whole buffer and can never fit.
            TransferTimeoutError: There was no room in time; nothing was inserted.
            LayoutError: Tokens or mask of a shape or dtype that they can't have.
            UnsupportedError: This end is a consumer.
            ClosedError: The buffer was closed.
        """
        self._put(Entry((tokens, roi, key, value, hidden), "insert"), timeout_s, blocks=False)

    def insert_blocks(
        self,
        tokens: Any,
        kv_cache: KvCache,
        block_ids: Any,
        hidden: Any | None = None,
        timeout_s: float | None = None,
    ) -> BlockTicket:
        """Adds blocks of a paged cache, where they are; a consumer pulls them straight into its own.

        Args:
            tokens: [n] integers, whose KV the blocks hold.
            kv_cache: A cache that is registered with this end's engine.
            block_ids: The blocks, in the order of the tokens.
            hidden: A tensor to go with them, or `None`.
            timeout_s: How long to wait for room for the tensors that go with them.

        Returns:
            What says when the blocks may be written again.

        Raises:
            LayoutError: The blocks are not the cache's, or not enough for the tokens.
            As `insert`.
        """
        entry = BlockEntry(tokens, kv_cache, block_ids, hidden)
        self._put(entry, timeout_s, blocks=True)
        return BlockTicket(self._shelves[True], entry)

    def drain(self, timeout_s: float | None = None) -> None:
        """Waits until everything that was inserted has been taken.

        Raises:
            TransferTimeoutError: It was not in time.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for shelf in self._shelves.values():
            if not shelf.drain(None if end is None else max(0.0, end - time.monotonic())):
                text = f"`{len(self)}` entries were not taken within `{timeout_s:g}` s"
                raise TransferTimeoutError(text, operation="drain")

    # The consumer's side

    def drop_select(
        self, tokens: Any | None, roi: Any | None = None, timeout_s: float | None = None, match: str | None = None
    ) -> list[Any | None]:
        """Takes an entry that matches out of the buffer; blocks until there is one.

        Args:
            tokens: [n] integers; `None` takes the first entry, whatever it is.
            roi: [n] which tokens count; `None` for all.
            timeout_s: How long to wait for a match; 0 asks once, `None` waits as long as the buffer is open.
            match: Other than the buffer's.

        Returns:
            tokens, roi, key, value and hidden as they were inserted.

        Raises:
            TransferTimeoutError: Nothing matched in time; the buffer is as it was.
            ClosedError: The buffer was closed, at either end.
            PeerLostError: The producer is gone.
            LayoutError: Tokens or mask of a shape or dtype that they can't have.
        """
        keys, once = self._keys(tokens, roi, "drop_select"), timeout_s is not None and timeout_s <= 0
        with self._select(keys, match, blocks=False, once=once) as selection:
            # Asking once takes as long as the answer does.
            return selection.start().wait(self._timeout_s if once else timeout_s)

    def select(self, tokens: Any | None, roi: Any | None = None, *, match: str | None = None) -> Selection:
        """Begins a `drop_select` and returns at once; the result is waited for, or it is cancelled."""
        selection = self._select(self._keys(tokens, roi, "drop_select"), match, blocks=False)
        try:
            return selection.start()
        except BaseException:
            selection.cancel()
            raise

    def drop_select_into(
        self,
        tokens: Any | None,
        kv_cache: KvCache,
        block_ids: Any,
        timeout_s: float | None = None,
        *,
        match: str | None = None,
        require: str | None = None,
        require_direct: bool = False,
        pull_timeout_s: float = 30.0,
    ) -> BlockMatch:
        """Takes an entry of blocks and pulls it into blocks of this end's cache; nothing is copied on the way.

        Args:
            tokens: [n] integers; `None` takes the first entry of blocks.
            kv_cache: A cache that is registered with this end's engine.
            block_ids: Where the KV of the tokens goes; at least as many as the tokens take.
            timeout_s: How long to wait for a match.
            match: Other than the buffer's.
            require: As for `KvCache.pull`.
            require_direct: As for `KvCache.pull`.
            pull_timeout_s: How long the pull may take.

        Returns:
            How many tokens agree and how it went. When it returns, the blocks hold their KV.

        Raises:
            TransferError: The pull failed; the entry goes back to its place, and the blocks hold nothing of use.
            UnsupportedError: This end is the producer, whose own blocks these are.
            As `drop_select`.
        """
        if self._remote is None or self._peer is None:
            raise UnsupportedError(
                "blocks are selected by a consumer with an engine of its own",
                operation="drop_select_into",
                hint="make a `LookupBuffer(engine, peer)`; in this process the blocks are at hand already",
            )
        keys = self._keys(tokens, None, "drop_select_into")
        if keys is not None:
            needed_blocks(kv_cache, len(keys), block_ids, "drop_select_into")
        options = {"require": require, "require_direct": require_direct, "timeout_s": pull_timeout_s}
        once = timeout_s is not None and timeout_s <= 0
        with self._select(keys, match, blocks=True, once=once) as selection:
            hit = selection.start().hit(self._timeout_s if once else timeout_s)
            found = pull(hit, kv_cache, block_ids, self._peer, **options)
            selection.take()
        return found

    def peek(
        self, tokens: Any | None, roi: Any | None = None, *, match: str | None = None, blocks: bool = False
    ) -> int | None:
        """Asks without taking: how many tokens agree with the entry that `drop_select` would get now.

        Args:
            tokens: As for `drop_select`.
            roi: As for `drop_select`.
            match: As for `drop_select`.
            blocks: Whether to look at entries of blocks rather than of tensors.

        Returns:
            The number, or `None` if nothing matches.
        """
        keys, longest = self._keys(tokens, roi, "peek"), self._how(match)
        if self._remote is not None:
            return self._remote.peek(keys, longest=longest, blocks=blocks, timeout_s=self._timeout_s)
        return self._shelves[blocks].peek(keys, longest=longest)

    # Both

    @property
    def used_bytes(self) -> int:
        """Bytes of tensors that this end holds."""
        return self._room.used

    def __len__(self) -> int:
        """Entries that wait at this end; those that are on their way to a consumer are not counted."""
        return sum(len(shelf) for shelf in self._shelves.values())

    def close(self) -> None:
        """Drops what was not selected, ends all waits here and at the other ends. Doing it twice is no error."""
        self._room.close()
        if self._remote is not None:
            self._remote.close()
        if self._door is not None:
            self._door.close()
        for shelf in self._shelves.values():
            shelf.close()
        if self._door is not None:
            for session in list(self._sessions):
                session.say_goodbye()
            if not self._door.join(_GOODBYE_S):
                for session in list(self._sessions):
                    session.cut()
                self._door.join(_GOODBYE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, entry: Entry, timeout_s: float | None, *, blocks: bool) -> None:
        operation = "insert_blocks" if blocks else "insert"
        if self._remote is not None:
            raise UnsupportedError(
                "this end is a consumer", operation=operation, hint="insert at the end that was made without a `peer`"
            )
        shelf = self._shelves[blocks]
        self._room.admit(entry.nbytes, lambda: shelf.put(entry, operation), timeout_s, operation)

    def _select(self, keys: Any | None, match: str | None, *, blocks: bool, once: bool = False) -> Selection:
        longest = self._how(match)
        if self._remote is not None:
            return self._remote.select(keys, longest=longest, blocks=blocks, once=once)
        return ask(self._shelves[blocks], keys, longest=longest, once=once)

    def _serve(self, pipe: Pipe, consumer: str) -> None:
        session = Session(self._shelves, pipe, consumer, self._hold_s)
        self._sessions.add(session)
        try:
            session.run()
        finally:
            self._sessions.discard(session)

    def _keys(self, tokens: Any | None, roi: Any | None, operation: str) -> Any | None:
        return None if tokens is None else keys_of(tokens, roi, operation)

    def _how(self, match: str | None) -> bool:
        return self._longest if match is None else _is_longest(match)


def _is_longest(match: str) -> bool:
    if match not in _MATCHES:
        raise ConfigError(f"`match` is `{match}`", operation="lookup", hint=f"accepted are {', '.join(_MATCHES)}")
    return match == "longest_prefix"
