"""The tensors of an exchange: made of private memory, filled with bytes that say where they belong, and checked.

Torch tensors or numpy arrays; whichever carries them sees ordinary tensors. The bytes are those of `pattern`: a tensor
is cut into sheets of at most a mebibyte, numbered through all tensors, so that one in another's place is wrong too.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.bench import pattern
from pdkv.bench.pattern import U64
from pdkv.bench.pipe.exchange import Exchange
from pdkv.errors import UnsupportedError

_SHEET = 1 << 20

Bytes = npt.NDArray[np.uint8]


class Tensors:
    """The tensors of one end, side by side in one block of private memory whose pages have been touched.

    Attributes:
        all: The tensors.
    """

    def __init__(self, exchange: Exchange, native: pattern.Native | None) -> None:
        """Allocates them.

        Raises:
            UnsupportedError: The exchange is of torch tensors and torch is not installed here.
        """
        self.exchange, self._native = exchange, native
        memory = mmap.mmap(-1, exchange.total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self._bytes[:: mmap.PAGESIZE] = 0
        size = exchange.tensor_bytes
        self.all = [_seen_as(self._bytes[at : at + size], exchange) for at in range(0, exchange.total_bytes, size)]

    def fill(self, stamp: int) -> None:
        """Writes the bytes of `stamp` into all of them."""
        exchange = self.exchange
        starts = np.arange(exchange.count, dtype=np.uint64) * np.uint64(exchange.tensor_bytes)
        for offsets, size, numbers in _sheets(exchange, starts, 0):
            keys = _keys(exchange, stamp, numbers)
            pattern.fill(self._bytes, offsets, size, keys, self._native, exchange.threads)


def count_wrong(
    received: Sequence[Any], exchange: Exchange, stamp: int, native: pattern.Native | None, what: str
) -> int:
    """Checks everything about tensors that came: how many, their dtypes and shapes, and every byte of them.

    Returns:
        Wrong bytes, the first of them named on stderr. All of a tensor are wrong if it is missing or of another kind.
    """
    missing = abs(exchange.count - len(received))
    if missing:
        print(f"wrong: {what}: {len(received)} tensors came, not {exchange.count}", file=sys.stderr)
    wrong = missing * exchange.tensor_bytes
    start = np.zeros(1, dtype=np.uint64)
    for i, tensor in enumerate(received[: exchange.count]):
        raw = _bytes_of(tensor, exchange)
        if raw is None:
            print(f"wrong: {what}: tensor {i} has another dtype or shape", file=sys.stderr)
            wrong += exchange.tensor_bytes
            continue
        for offsets, size, numbers in _sheets(exchange, start, i):
            keys = _keys(exchange, stamp, numbers)
            found = pattern.find_wrong(raw, offsets, size, keys, native, exchange.threads)
            wrong += found.report(f"{what} tensor {i}") if found.pages else 0
    return wrong


def _sheets(exchange: Exchange, starts: U64, first: int) -> Iterator[tuple[U64, int, U64]]:
    """Cuts tensors that start at these offsets into sheets; gives offsets, size and numbers of those of one size."""
    size = min(exchange.tensor_bytes, _SHEET)
    whole, rest = divmod(exchange.tensor_bytes, size)
    per_tensor = np.uint64(whole + (rest > 0))
    bases = (np.arange(len(starts), dtype=np.uint64) + np.uint64(first)) * per_tensor
    within = np.arange(whole, dtype=np.uint64)
    yield _sums(starts, within * np.uint64(size)), size, _sums(bases, within)
    if rest:
        yield starts + np.uint64(whole * size), rest, bases + np.uint64(whole)


def _sums(rows: U64, columns: U64) -> U64:
    return np.ascontiguousarray((rows[:, None] + columns[None, :]).reshape(-1))


def _keys(exchange: Exchange, stamp: int, numbers: U64) -> U64:
    return pattern.keys(exchange.seed, stamp, np.zeros(1, dtype=np.uint64), numbers)


def _seen_as(raw: Bytes, exchange: Exchange) -> Any:
    if exchange.library == "numpy":
        return raw.view(exchange.dtype_name).reshape(exchange.shape)
    torch = _torch()
    return torch.from_numpy(raw).view(getattr(torch, exchange.dtype)).view(exchange.shape)


def _bytes_of(tensor: Any, exchange: Exchange) -> Bytes | None:
    """Gives a tensor's bytes in order, or nothing if it is not one of the exchange."""
    if tuple(getattr(tensor, "shape", ())) != exchange.shape:
        return None
    if str(tensor.dtype).removeprefix("torch.") != exchange.dtype_name:
        return None
    if exchange.library == "numpy":
        plain = np.ascontiguousarray(tensor).reshape(-1)
    else:
        plain = tensor.contiguous().view(-1).view(_torch().uint8).numpy()
    return plain.view(np.uint8)


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise UnsupportedError("torch is not installed", hint="install it, or measure with numpy arrays") from error
    return torch
