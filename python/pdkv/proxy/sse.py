"""Cuts a stream of server-sent events where events end. Pure: bytes in, bytes out.

A client gets whole events, each at once, so that a stream which breaks off can still end with an event of ours. What is
in the events is not looked at, but for the first ones and for the one that says that the stream is complete.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

from pdkv.proxy.answers import Answer

_DONE = re.compile(rb"^data: ?\[DONE\]\s*$", re.MULTILINE)

# More than vLLM says before its first token; a larger event says something.
_MOST_HELD_BYTES = 64 << 10


class Begins(Enum):
    """How a stream begins."""

    NOT_YET = "with nothing but who speaks"
    WELL = "with something"
    BADLY = "with the instance's own error"


class Events:
    """The events of one stream.

    Attributes:
        complete: Whether the event that ends a complete stream went by.
    """

    def __init__(self) -> None:
        self.complete = False
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Takes what arrived; gives what ends with an event, and keeps what doesn't for the next call."""
        start = max(0, len(self._rest) - 3)  # a boundary may lie across two chunks
        self._rest += chunk
        end = max(_end(self._rest, b"\n\n", start), _end(self._rest, b"\r\n\r\n", start))
        whole = bytes(self._rest[:end])
        del self._rest[:end]
        self._look(whole)
        return whole

    def flush(self) -> bytes:
        """Gives what was left when a stream ended by itself, if that completes it. Part of an event is dropped."""
        rest = bytes(self._rest)
        self._rest.clear()
        self._look(rest)
        return rest if self.complete else b""

    def _look(self, whole: bytes) -> None:
        self.complete = self.complete or bool(_DONE.search(whole))


def begins(whole: bytes) -> Begins:
    """What the first events of a stream say: of a chat vLLM names the role before it tells that it couldn't go on."""
    if len(whole) > _MOST_HELD_BYTES:
        return Begins.WELL
    for line in whole.splitlines():
        if not line.startswith(b"data:"):
            continue
        try:
            event = json.loads(line.removeprefix(b"data:"))
        except (ValueError, RecursionError):
            return Begins.WELL
        if not isinstance(event, dict):
            return Begins.WELL
        if isinstance(error := event.get("error"), dict):
            return Begins.BADLY if error.get("code") == 500 else Begins.WELL
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices or not all(map(_says_nothing, choices)):
            return Begins.WELL
    return Begins.NOT_YET


def _says_nothing(choice: Any) -> bool:
    if not isinstance(choice, dict) or not isinstance(delta := choice.get("delta"), dict):
        return False
    said = [value for name, value in delta.items() if name != "role"]
    return not any(said) and choice.get("finish_reason") is None


def error_event(answer: Answer) -> bytes:
    """An error inside a stream, as OpenAI's clients expect it."""
    return b"data: " + answer.body + b"\n\n"


def _end(data: bytearray, boundary: bytes, start: int) -> int:
    at = data.rfind(boundary, start)
    return at + len(boundary) if at >= 0 else 0
