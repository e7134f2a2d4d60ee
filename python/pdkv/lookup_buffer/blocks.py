"""Entries that are blocks of a paged cache: pinned where they are, pulled from there straight into other pages."""

from __future__ import annotations

import hashlib
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from pdkv.errors import ClosedError, IntegrityError, LayoutError, PdkvError, TransferTimeoutError
from pdkv.lookup_buffer.entry import Entry
from pdkv.lookup_buffer.tensors import keys_of

if TYPE_CHECKING:
    from pdkv.engine import Export, KvCache, Peer, Transfer
    from pdkv.lookup_buffer.selection import Hit
    from pdkv.lookup_buffer.shelf import Shelf

__all__ = ["BlockEntry", "BlockMatch", "BlockTicket", "needed_blocks", "pull"]


class BlockMatch(NamedTuple):
    """What `drop_select_into` got.

    Attributes:
        num_tokens: How many leading tokens agree; their KV is in the consumer's blocks.
        num_blocks: How many of the consumer's blocks were written.
        tokens: The entry's tokens, all of them.
        hidden: What was inserted with the blocks.
        transfer: The pull, with its path and statistics.
    """

    num_tokens: int
    num_blocks: int
    tokens: Any
    hidden: Any | None
    transfer: Transfer


class BlockEntry(Entry):
    """Blocks that wait for a consumer. They are exported anew for each consumer that they are given to."""

    __slots__ = ("_blocks", "_cache", "_exports", "_lending")

    def __init__(self, tokens: Any, cache: KvCache, block_ids: Any, hidden: Any | None) -> None:
        super().__init__([tokens, None, None, None, hidden], "insert_blocks")
        if not len(self.keys):
            raise LayoutError("there are no tokens", operation="insert_blocks")
        # Copied: the caller's list goes on changing.
        self._cache, self._blocks = cache, _listed(block_ids)
        self._lending = threading.Lock()
        self._exports: list[Export] = []
        # Blocks that can't be exported are the caller's error, not the first consumer's.
        self._export(1.0).release()

    def lend(self, lease_s: float) -> Export:
        """Exports the blocks for one consumer."""
        with self._lending:
            if self.fate != "waiting":
                raise ClosedError("the blocks left the buffer", operation="drop_select_into")
            export = self._export(lease_s)
            self._exports = [*(old for old in self._exports if not old.quiesced), export]
        return export

    def end(self, fate: str) -> None:
        """It left the buffer: whoever gave it up, and was slow to say so, has no more to read."""
        with self._lending:
            super().end(fate)
            exports = self._exports
        for export in exports:
            with suppress(PdkvError):  # the engine may be closed, and then there is nothing to release
                export.release()

    def wait_quiesced(self, timeout_s: float | None) -> bool:
        """Waits until no consumer reads the blocks any more."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lending:
            exports = self._exports
        return all(
            export.wait_quiesced(None if end is None else max(0.0, end - time.monotonic())) for export in exports
        )

    def _export(self, lease_s: float) -> Export:
        digest = digest_of(self.keys)
        return self._cache.export(
            self._blocks, num_tokens=len(self.keys), digest=digest, consumers=1, lease_s=min(lease_s, 3600.0)
        )


class BlockTicket:
    """What `insert_blocks` returns: the blocks must not be written while they are in the buffer."""

    def __init__(self, shelf: Shelf, entry: BlockEntry) -> None:
        self._shelf, self._entry = shelf, entry

    @property
    def state(self) -> str:
        """`waiting`, `taken` by a consumer that has all of it, or `dropped`."""
        return self._entry.fate

    def wait(self, timeout_s: float | None = None) -> str:
        """Waits until the blocks may be used again.

        Returns:
            How it ended: `taken` or `dropped`.

        Raises:
            TransferTimeoutError: `timeout_s` passed first: the blocks are not to be written yet.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        fate = self._entry.wait(timeout_s)
        left = None if end is None else max(0.0, end - time.monotonic())
        if fate != "waiting" and self._entry.wait_quiesced(left):
            return fate
        num_tokens = len(self._entry.keys)
        raise TransferTimeoutError(
            f"the blocks of `{num_tokens}` tokens are still in the buffer, or being read, after `{timeout_s}` s",
            operation="wait",
            hint="drop() takes them out of the buffer; wait again for whoever is reading them",
        )

    def drop(self) -> None:
        """Takes the blocks out of the buffer. A consumer that is just pulling them finishes: `wait` waits for that."""
        self._shelf.drop(self._entry)


def needed_blocks(cache: KvCache, num_tokens: int, block_ids: Any, operation: str) -> int:
    """How many blocks so many tokens take.

    Raises:
        LayoutError: There are not so many.
    """
    per_block = cache.layout.block_tokens
    needed = -(-num_tokens // per_block)
    if needed > len(block_ids):
        raise LayoutError(
            f"`{num_tokens}` tokens take `{needed}` blocks of `{per_block}`, and there are `{len(block_ids)}`",
            operation=operation,
        )
    return needed


def pull(hit: Hit, cache: KvCache, block_ids: Any, peer: Peer, **options: Any) -> BlockMatch:
    """Pulls what was found into a consumer's blocks; the hit is neither taken nor given back here.

    Args:
        hit: An entry of blocks.
        cache: The consumer's.
        block_ids: The consumer's blocks.
        peer: The connection to the producer.
        **options: Of `KvCache.pull`.
    """
    if hit.reference is None or not hit.matched:
        raise IntegrityError("the entry that came has no blocks", operation="drop_select_into")
    tokens, hidden, matched = hit.tensors[0], hit.tensors[4], hit.matched
    needed = needed_blocks(cache, matched, block_ids, "drop_select_into")
    into = _listed(block_ids)[:needed]
    digest = digest_of(keys_of(tokens, None, "drop_select_into"))
    transfer = cache.pull(hit.reference, into=into, digest=digest, peer=peer, **options)
    try:
        transfer.wait()
    except BaseException:
        # Nothing is written any more once this has returned, whatever ended the wait.
        transfer.cancel()
        transfer.wait_quiesced(None)
        raise
    return BlockMatch(matched, needed, tokens, hidden, transfer)


def digest_of(keys: Any) -> bytes:
    """What names a sequence of tokens in a reference."""
    return hashlib.blake2b(keys.tobytes(), digest_size=32).digest()


def _listed(block_ids: Any) -> list[Any]:
    """A copy; what is in it the cache judges."""
    return list(block_ids.tolist() if hasattr(block_ids, "tolist") else block_ids)
