"""Makes a value that a stranger sent fit for a message: short, printable, one line."""

from __future__ import annotations

__all__ = ["shown"]

_LONGEST = 80


def shown(value: object) -> str:
    """Gives a value's text, or its escaped form where a log line could be forged with it."""
    text = value if isinstance(value, str) and value.isascii() and value.isprintable() else ascii(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
