"""Sizes as people write them (`4KiB`, `512MiB`), and comma lists of anything. Knows no argparse."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from pdkv.errors import ConfigError

T = TypeVar("T")

_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "ki": 1 << 10,
    "kib": 1 << 10,
    "mi": 1 << 20,
    "mib": 1 << 20,
    "gi": 1 << 30,
    "gib": 1 << 30,
    "ti": 1 << 40,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)
_LARGEST = 1 << 50


def parse_size(text: str) -> int:
    """Reads a number of bytes: a plain number, an SI unit (`64kB`) or a binary one (`64KiB`).

    Raises:
        ConfigError: It is not a size, not a whole number of bytes, zero, or absurdly large.
    """
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ConfigError(f"`{text}` is not a size", hint="write for example `4096`, `4KiB`, `512MiB` or `1.5GiB`")
    whole, _, fraction = found[1].partition(".")
    unit = _UNITS[found[2]]
    scale: int = 10 ** len(fraction)
    size, rest = divmod(int(whole + fraction) * unit, scale)
    if rest or not 0 < size <= _LARGEST:
        raise ConfigError(f"`{text}` is not a whole number of bytes between 1 and 1 PiB")
    return size


def format_size(size: int) -> str:
    """Writes a size with the largest binary unit that divides it, else with one decimal."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            whole, rest = divmod(size, 1 << shift)
            return f"{whole}{unit}" if rest == 0 else f"{size / (1 << shift):.1f}{unit}"
    return f"{size}B"


def parse_list(text: str, item: Callable[[str], T]) -> list[T]:
    """Reads a comma list, each entry by `item`; empty entries are refused.

    Raises:
        ConfigError: The list or one of its entries is empty, or `item` refused an entry.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"`{text}` has an empty entry", hint="separate values by single commas")
    return [item(part) for part in parts]


def parse_count(text: str) -> int:
    """Reads a whole number of at least 1.

    Raises:
        ConfigError: It is not one.
    """
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise ConfigError(f"`{text}` is not a whole number of at least 1")
    return int(text)
