"""`SimpleBuffer`: vLLM 0.8's class of that name over any two pipes, and with either end of vLLM's at the other side.

What the two ends send each other is vLLM's: a signal on one pipe, then tokens and mask on the other, then five tensors
back. One consumer, one request at a time. What is better than there: a request without a mask, a stored `None`, an item
that can never fit, and the end of a producer nobody asks any more. `LookupBuffer` has the rest.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any, Protocol

from pdkv.errors import ClosedError, PdkvError, UnsupportedError
from pdkv.lookup_buffer.entry import Entry
from pdkv.lookup_buffer.local import ask
from pdkv.lookup_buffer.room import Room
from pdkv.lookup_buffer.selection import fresh
from pdkv.lookup_buffer.shelf import Shelf
from pdkv.lookup_buffer.tensors import keys_of

__all__ = ["SimpleBuffer", "TensorPipe"]

_log = logging.getLogger("pdkv.lookup")
# A pipe's end by any maker, as vLLM recognises it.
_ENDED = "Connection closed by peer"
_TENSORS = 5


class TensorPipe(Protocol):
    """vLLM 0.8's `KVPipeBase`, of which `pdkv.PdkvPipe` and `pdkv.Pipe` are two."""

    def send_tensor(self, tensor: Any | None) -> None:
        """Sends a tensor or `None`."""

    def recv_tensor(self) -> Any | None:
        """Receives the next one."""

    def close(self) -> None:
        """Ends the pipe."""


class SimpleBuffer:
    """A lookup buffer over two pipes: the side that inserts is the producer, the other selects.

    Args:
        signal_pipe: Carries one small tensor for each request, in host memory.
        data_pipe: Carries everything else.
        buffer_size_thresh: How many bytes of tensors wait at the producer before `insert` blocks.
        clone: Whether `insert` copies its tensors, as vLLM's does. Without, they must not change until they were
            selected, and nothing is copied.
    """

    def __init__(
        self, signal_pipe: TensorPipe, data_pipe: TensorPipe, buffer_size_thresh: float, *, clone: bool = True
    ) -> None:
        self.signal_pipe, self.data_pipe = signal_pipe, data_pipe
        self.buffer_size_threshold = buffer_size_thresh
        self._clone = clone
        self._room = Room(buffer_size_thresh)
        self._shelf = Shelf(self._room)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # Why nothing more is answered here, or asked.
        self._error: BaseException | None = None

    def insert(
        self, input_tokens: Any | None, roi: Any | None, key: Any | None, value: Any | None, hidden: Any | None
    ) -> None:
        """Adds an entry; blocks while there is no room for it. The first one starts the thread that answers requests.

        Args:
            input_tokens: [n] integers, or `None`.
            roi: [n] the mask, or `None` for all.
            key: Any tensor, or `None`.
            value: Any tensor, or `None`.
            hidden: Any tensor, or `None`.

        Raises:
            CapacityError: The entry can never fit; vLLM's waits for ever.
            ClosedError: The buffer was closed, or the consumer is done.
            Whatever ended the thread that answers, such as `BrokenPipeException` when the consumer is gone.
        """
        self._check()
        tensors = (input_tokens, roi, key, value, hidden)
        entry = Entry([_clone(tensor) for tensor in tensors] if self._clone else tensors, "insert")
        try:
            self._room.admit(entry.nbytes, lambda: self._shelf.put(entry, "insert"), None, "insert")
        except ClosedError:
            self._check()
            raise
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._answer_all, name="pdkv-simple-buffer", daemon=True)
                self._thread.start()

    def drop_select(self, input_tokens: Any | None, roi: Any | None) -> list[Any | None]:
        """Takes an entry that matches out of the producer's buffer; blocks until there is one.

        Args:
            input_tokens: [n] integers; `None` takes the first entry, whatever it is.
            roi: [n] the mask; `None` for all.

        Returns:
            tokens, roi, key, value and hidden; roi as booleans.

        Raises:
            UnsupportedError: This end is a producer.
            Whatever the pipes raise, such as `BrokenPipeException`.
        """
        if self._thread is not None:
            raise UnsupportedError(
                "this end inserts; the other end selects",
                operation="drop_select",
                hint="make a SimpleBuffer over the other ends of the two pipes",
            )
        # One exchange after the other: answers carry no names.
        with self._lock:
            self._check()
            like = input_tokens if input_tokens is not None else roi
            if roi is None:
                # vLLM's own producer can't do without, whether it uses it or not.
                roi = _filled(like, 0 if input_tokens is None else len(input_tokens), 1)
            signal, mask = _filled(like, 1, 0, integers=True), _floats(roi)
            try:
                self.signal_pipe.send_tensor(signal)
                self.data_pipe.send_tensor(input_tokens)
                self.data_pipe.send_tensor(mask)
                tensors = [self.data_pipe.recv_tensor() for _ in range(_TENSORS)]
            except BaseException as error:
                # What is left of the exchange in the pipe would be taken for the next one's.
                self._end(error)
                raise
        if tensors[1] is not None:
            tensors[1] = tensors[1] > 0.5
        return tensors

    def close(self, timeout_s: float | None = None) -> None:
        """Ends this side.

        A consumer tells the producer that it is done. A producer takes no more, and goes on answering until its
        consumer is done or asks for what is not there, as vLLM's does.

        Args:
            timeout_s: How long a producer waits for that; `None` waits as long as the pipes hold.
        """
        if self._thread is not None:
            self._shelf.finish()
            self._room.close()
            self._thread.join(timeout_s)
            self._shelf.close()
            return
        try:
            self.signal_pipe.send_tensor(None)
        except (PdkvError, RuntimeError, OSError) as error:
            _log.debug("the producer is gone already: %s", error)

    def _check(self) -> None:
        error = self._error
        if isinstance(error, PdkvError):
            raise fresh(error)
        if isinstance(error, Exception):
            raise error.with_traceback(None)
        if error is not None:
            raise ClosedError("an exchange was interrupted", operation="lookup")

    def _end(self, error: BaseException) -> None:
        """Nothing more can be exchanged: both ends learn it."""
        self._error = error
        self._room.close()
        self._shelf.finish()
        try:
            # What is unread must not hold this up.
            getattr(self.data_pipe, "abort", self.data_pipe.close)()
        except (PdkvError, RuntimeError, OSError) as failure:
            _log.debug("the pipe could not be closed: %s", failure)

    def _answer_all(self) -> None:
        try:
            while self.signal_pipe.recv_tensor() is not None:
                self._answer(self.data_pipe.recv_tensor(), self.data_pipe.recv_tensor())
        except Exception as error:  # noqa: BLE001 - whatever it is, the next insert raises it
            if _ENDED not in str(error) and not isinstance(error, ClosedError):
                _log.warning("requests are no longer answered: %s", error)
            self._end(error)
        else:
            self._error = ClosedError("the consumer is done", operation="insert")
            self._room.close()

    def _answer(self, tokens: Any | None, roi: Any | None) -> None:
        keys = None if tokens is None else keys_of(tokens, roi, "drop_select")
        # What could not be sent whole goes back to its place.
        with ask(self._shelf, keys, longest=False) as selection:
            tensors = list(selection.start().hit().tensors)
            tensors[1] = _floats(tensors[1])
            for tensor in tensors:
                self.data_pipe.send_tensor(tensor)
            # Tensors that are not our own are in the buffer until they have arrived: their owner leaves them alone.
            flush = None if self._clone else getattr(self.data_pipe, "flush", None)
            if flush is not None:
                flush()
            selection.take()


def _clone(tensor: Any | None) -> Any | None:
    if tensor is None:
        return None
    return tensor.clone() if hasattr(tensor, "clone") else tensor.copy()


def _floats(mask: Any | None) -> Any | None:
    if mask is None:
        return None
    return mask.float() if hasattr(mask, "float") else mask.astype("float32")


def _filled(like: Any | None, length: int, value: int, *, integers: bool = False) -> Any:
    """A tensor in host memory, of torch where `like` is, or where it is loaded and there is nothing to be like."""
    torch = sys.modules.get("torch")
    if torch is not None and (like is None or isinstance(like, torch.Tensor)):
        return torch.full((length,), value, dtype=torch.int64 if integers else torch.float32)
    import numpy as np

    return np.full(length, value, np.int64 if integers else np.float32)
