"""Cuts a stream of server-sent events where events end. Pure: bytes in, bytes out.

A client gets whole events, each at once, so that a stream which breaks off can still end with an event of ours. What is
in the events is not looked at, but for the one that says that the stream is complete.
"""

from __future__ import annotations

import re

from pdkv.proxy.answers import Answer

_DONE = re.compile(rb"^data: ?\[DONE\]\s*$", re.MULTILINE)


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


def error_event(answer: Answer) -> bytes:
    """An error inside a stream, as OpenAI's clients expect it."""
    return b"data: " + answer.body + b"\n\n"


def _end(data: bytearray, boundary: bytes, start: int) -> int:
    at = data.rfind(boundary, start)
    return at + len(boundary) if at >= 0 else 0
