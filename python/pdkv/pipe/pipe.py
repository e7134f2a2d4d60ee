"""A pipe: tensors in one order to a peer, and tensors in one order from it, both at once.

Bytes move natively: a small tensor in a batch over a stream, a large one from its own memory straight into the
receiver's. This module says what a tensor is and keeps what belongs together together; it knows no transport.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pdkv.errors import (
    ClosedError,
    DeviceError,
    IntegrityError,
    LayoutError,
    PdkvError,
    PeerLostError,
    TransferCancelledError,
    TransferTimeoutError,
)
from pdkv.pipe.device import Places
from pdkv.pipe.tensors import Description, describe, maker

if TYPE_CHECKING:
    from pdkv.engine import Engine, Path, Peer, PipeBuffer, PipeReceiver, PipeSender

__all__ = ["BrokenPipeException", "Pipe"]

# What an item is, in the first byte of its tag.
_TENSOR, _NONE, _MESSAGE = b"t", b"n", b"m"
# A message: how many items follow, and then the words of whoever sent it.
_COUNT = struct.Struct("<cI")
_MAX_TENSORS = 1 << 16
# How often who waits for the other end's half looks whether there is another end.
_LOOK_S = 0.25
# How long an end that closes only delivers, before it tells the other end that it receives nothing more.
_GRACE_S = 1.0
# An item without a tensor.
_NOTHING = Description(None, (), (), 0, 0, None)


class BrokenPipeException(PeerLostError, RuntimeError):  # noqa: N818 - vLLM's name
    """The other end of a pipe is gone, or an item could not be delivered; the pipe carries nothing more.

    The name is that of vLLM 0.8's `pynccl_pipe`, and a `RuntimeError` that says "Connection closed by peer" is what
    its `SimpleBuffer` takes for an orderly end.
    """

    kind = PeerLostError.kind


class Pipe:
    """A pipe between two engines that are connected to each other: each end makes one, with its own `Peer`.

    `send_tensor` and `recv_tensor` may run in different threads, and several threads may send. Everything that one
    end sends arrives once and in order, or the pipe breaks and both ends say so.

    Args:
        engine: This end's engine. It must listen, for the peer's half comes to it.
        peer: The connection to the other end's engine, from `engine.connect`.
        channel: Which of the pipes between the two engines this is; both ends give the same name.
        buffer_bytes: Bytes that may wait to be sent before `send_tensor` blocks.
        device: Where received tensors land: `"cpu"` or a torch device such as `"cuda:0"`. The default is `"cpu"`.
        library: What received tensors are: `"torch"`, `"numpy"`, or `None` for torch where it is installed.
        timeout_s: How long the first receive waits for the other end to make its half, where it has no time of its own.

    Raises:
        PeerLostError: The peer is gone.
        UnsupportedError: The peer's release has no pipes; `library` is not installed.
    """

    def __init__(
        self,
        engine: Engine,
        peer: Peer,
        *,
        channel: str = "pipe",
        buffer_bytes: int = 1_000_000_000,
        device: str | None = None,
        library: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._name = channel.encode()
        self._engine, self._peer, self._timeout_s = engine, peer, timeout_s
        self._places = Places(device or "cpu", buffer_bytes, maker(library))
        # Messages are not mixed with what other threads send, and one thread puts a message together.
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._held: list[tuple[bytes, str | None, tuple[int, ...], PipeBuffer | None]] = []
        self._receiver: PipeReceiver | None = None
        self._closed = self._aborted = False
        self._sender: PipeSender = peer.open_pipe(self._name, limit_bytes=buffer_bytes)

    def send_tensor(self, tensor: Any | None, timeout_s: float | None = None) -> None:
        """Sends a tensor, or `None`; returns when it is on its way, not when it has arrived.

        Blocks while more than `buffer_bytes` wait to be sent. A tensor of up to 64 KiB is copied before this returns.
        A larger one is not: it is kept alive, and must not be changed, until the receiver has it (`flush` waits
        for that). A tensor that is not contiguous is gathered by its strides on the way.

        Args:
            tensor: Any dense torch tensor or a numpy array: every dtype, scalars, empty ones.
            timeout_s: How long to wait for room; `None` waits as long as the peer lives.

        Raises:
            BrokenPipeException: The peer is gone, or something that was sent earlier could not be delivered.
            TransferTimeoutError: There was no room in time; the tensor was not taken.
            ClosedError: The pipe was closed at this end.
            UnsupportedError: A tensor that no dtype, shape and bytes describe, such as a sparse one.
            LayoutError: It is no tensor.
        """
        until = _Until(timeout_s)
        until.lock(self._sending, "send_tensor")
        try:
            item = _NOTHING if tensor is None else describe(self._fetched(tensor, until))
            self._sender.send(_NONE if tensor is None else _TENSOR, *item, until.left())
        except PdkvError as error:
            raise self._translated(error, self._sender) from error
        finally:
            self._sending.release()

    def recv_tensor(self, timeout_s: float | None = None) -> Any | None:
        """Receives what the other end sent next, with its dtype and shape; blocks until it is all here.

        The tensor is the receiver's own; its memory is used again when nobody holds it any more.

        Args:
            timeout_s: How long to wait; `None` waits as long as the peer lives. What did not come in time is not
                lost: the next call goes on waiting for it.

        Raises:
            BrokenPipeException: The other end closed the pipe, or is gone.
            TransferTimeoutError: Nothing came in time.
            ClosedError: The pipe was closed at this end.
            IntegrityError: A message came, which `recv_message` receives, or bytes that are no tensor.
            UnsupportedError: What makes tensors here has no such dtype; that tensor is dropped.
        """
        until = _Until(timeout_s)
        until.lock(self._receiving, "recv_tensor")
        try:
            self._fill(1, until)
            if self._held[0][0] not in (_TENSOR, _NONE):
                raise IntegrityError("a message came, not a tensor", operation="recv_tensor", hint="use recv_message()")
            (tensor,) = self._made(1)
            return tensor
        finally:
            self._receiving.release()

    def send_message(self, tag: bytes, tensors: Sequence[Any | None] = (), timeout_s: float | None = None) -> None:
        """Sends some bytes and tensors that are received together.

        Args:
            tag: Up to 60 KiB that say what this is.
            tensors: As for `send_tensor`, with `None` among them or not.
            timeout_s: How long to wait for room, for all of it. When time runs out halfway, the pipe breaks.

        Raises:
            BrokenPipeException, TransferTimeoutError, ClosedError, UnsupportedError: As `send_tensor`.
            LayoutError: More than 65,536 tensors.
        """
        if len(tensors) > _MAX_TENSORS:
            text = f"`{len(tensors)}` tensors in a message of at most `{_MAX_TENSORS}`"
            raise LayoutError(text, operation="send_message")
        # What can't be sent is found before anything is. What is on a device is copied here only when it is its turn:
        # all of a message may be more than the pinned pool.
        items = [None if tensor is None or self._places.elsewhere(tensor) else describe(tensor) for tensor in tensors]
        until = _Until(timeout_s)
        until.lock(self._sending, "send_message")
        try:
            self._sender.send(_COUNT.pack(_MESSAGE, len(items)) + tag, *_NOTHING, until.left())
            try:
                for tensor, item in zip(tensors, items, strict=True):
                    if tensor is not None and item is None:
                        item = describe(self._fetched(tensor, until))
                    self._sender.send(_NONE if item is None else _TENSOR, *(item or _NOTHING), until.left())
            except BaseException:
                # Half a message is none: what would follow it could not be told from its rest.
                self._sender.abort()
                raise
        except PdkvError as error:
            raise self._translated(error, self._sender) from error
        finally:
            self._sending.release()

    def recv_message(self, timeout_s: float | None = None) -> tuple[bytes, list[Any | None]]:
        """Receives the next message: its tag and its tensors.

        Raises:
            BrokenPipeException, TransferTimeoutError, ClosedError: As `recv_tensor`.
            IntegrityError: A tensor came, which `recv_tensor` receives, or bytes that are neither.
            UnsupportedError: What makes tensors here has no such dtype; that message is dropped.
        """
        until = _Until(timeout_s)
        until.lock(self._receiving, "recv_message")
        try:
            self._fill(1, until)
            tag = self._held[0][0]
            if tag[:1] != _MESSAGE or len(tag) < _COUNT.size:
                raise IntegrityError("a tensor came, not a message", operation="recv_message", hint="use recv_tensor()")
            count = _COUNT.unpack_from(tag)[1]
            if count > _MAX_TENSORS:
                raise self._garbage(f"a message of `{count}` tensors")
            self._fill(1 + count, until)
            return tag[_COUNT.size :], self._made(1 + count)[1:]
        finally:
            self._receiving.release()

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until the other end has taken in everything that was sent; then the tensors may be changed.

        Raises:
            BrokenPipeException: It could not be delivered.
            TransferTimeoutError: It was not all taken in time; nothing is lost.
        """
        try:
            self._sender.flush(timeout_s)
        except PdkvError as error:
            raise self._translated(error, self._sender) from error

    def close(self, timeout_s: float | None = 10.0) -> None:
        """Delivers what was sent and receives nothing more; whoever receives here is woken. Twice is no error.

        What the other end has sent and was not received here is dropped, and it is told so.

        Args:
            timeout_s: How long to wait for the other end to take what was sent; what it did not take is dropped.

        Raises:
            BrokenPipeException: Something that was sent was not delivered.
            TransferTimeoutError: The other end did not take all of it in time.
        """
        if self._closed:
            return
        self._closed = True
        until = _Until(timeout_s)
        try:
            with suppress(TransferTimeoutError):
                # The other end may answer what it gets now, and should hear of the end only after it.
                self._sender.flush(min(_GRACE_S, until.left() or _GRACE_S))
            # It may be closing, too: then neither waits for the other to receive.
            self._end_receiving()
            self._sender.close(until.left())
        except PdkvError as error:
            raise self._translated(error, self._sender) from error
        finally:
            self.abort()

    def abort(self) -> None:
        """Ends both directions at once and drops what was not delivered."""
        self._closed = self._aborted = True
        self._sender.abort()
        self._end_receiving()

    def _end_receiving(self) -> None:
        receiver = self._receiver
        if receiver is None:
            # A half that nobody received from would be found by the next pipe of this name.
            with suppress(PdkvError):
                receiver = self._engine.accept_pipe(self._name, incarnation=self._peer.incarnation, timeout_s=0)
        if receiver is not None:
            receiver.close()

    @property
    def path(self) -> Path | None:
        """How the last tensor of more than 64 KiB went, or `None` before the first."""
        return self._sender.path

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._sender.queued_bytes

    @property
    def device(self) -> str:
        """Where received tensors land."""
        return self._places.device

    @property
    def stats(self) -> dict[str, int]:
        """What was sent: `items`, `bytes`, and of these `inline_bytes`, `direct_bytes` and `staged_bytes`."""
        return dict(self._sender.stats)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _fetched(self, tensor: Any, until: _Until) -> Any:
        """The tensor in host memory; waits for the pinned pool no longer than the pipe lives."""
        return self._places.fetch(tensor, until.left, self._check_alive) if self._places.elsewhere(tensor) else tensor

    def _check_alive(self) -> None:
        # A native call: buffers that came back while nobody was in one are let go in it.
        if not self._sender.alive:
            self._sender.flush(0)
            raise ClosedError("the pipe is over", operation="send")

    def _fill(self, items: int, until: _Until) -> None:
        """Receives until so many items are held. They stay held when time runs out or somebody interrupts."""
        while len(self._held) < items:
            try:
                receiver = self._receiver or self._accept(until)
                # In one native call: Python lets no signal in between receiving an item and keeping it.
                self._held.extend(map(receiver.recv, (until.left(),)))
            except PdkvError as error:
                raise self._translated(error, self._receiver) from error
            if len(self._held) > 1 and self._held[-1][0] not in (_TENSOR, _NONE):
                raise self._garbage("a message ended before its last tensor")

    def _made(self, items: int) -> list[Any | None]:
        """Makes tensors of the items that are held, and holds them no more.

        One that can't ever be made takes with it what belongs to it: the next receive gets what was sent after. One
        for which there was no memory is tried again then.
        """
        try:
            tensors = [
                None if dtype is None else self._places.land(dtype, shape, buffer)
                for _, dtype, shape, buffer in self._held[:items]
            ]
        except PdkvError:
            self._held.clear()
            raise
        except RuntimeError as error:
            raise DeviceError(
                f"what came can't be put on `{self._places.device}`: {error}",
                operation="recv",
                hint="make room and receive again: it is still here",
            ) from error
        self._held.clear()
        return tensors

    def _garbage(self, text: str) -> IntegrityError:
        """Nothing after this can be told apart; the pipe is over."""
        self.abort()
        self._held.clear()
        return IntegrityError(text, operation="recv_message")

    def _await_other_half(self) -> None:
        """Blocks until the other end has made its pipe, too.

        Raises:
            TransferTimeoutError: It did not within the time that a first receive waits.
            PeerLostError: It is gone.
        """
        with self._receiving:
            self._accept(_Until(self._timeout_s))

    def _accept(self, until: _Until) -> PipeReceiver:
        """Waits for the other end's half, which is there once it has made its pipe."""
        if self._closed:
            raise ClosedError("the pipe was closed", operation="recv")
        if until.left() is None:
            until = _Until(self._timeout_s)
        while True:
            left = until.left() or 0.0
            try:
                # An engine that ended and came back is another peer.
                receiver = self._engine.accept_pipe(
                    self._name, incarnation=self._peer.incarnation, timeout_s=min(left, _LOOK_S)
                )
                break
            except TransferTimeoutError as error:
                if self._closed:
                    raise ClosedError("the pipe was closed", operation="recv") from error
                if not self._peer.alive:
                    raise PeerLostError("it is gone and never made its end of the pipe", operation="recv") from error
                if not until.left():
                    raise
        self._receiver = receiver
        if self._closed:
            receiver.close()
        return receiver

    def _translated(self, error: PdkvError, half: PipeSender | PipeReceiver | None) -> PdkvError:
        """What is raised for a native error: the end of the pipe by its own name, everything else as it is."""
        ended_there = isinstance(error, ClosedError) and error.context.get("closed_by") == "peer"
        # Only aborting cancels, here or there.
        gave_up_there = isinstance(error, TransferCancelledError) and not self._aborted
        # Whatever the other end calls its reason, there is nothing to be tried again.
        no_second_try = error.retryable and half is not None and not half.alive and not self._aborted
        if not (ended_there or gave_up_there or no_second_try or isinstance(error, PeerLostError)):
            return error
        return BrokenPipeException(
            f"Connection closed by peer `{self._peer.name}`: {error.message}",
            operation=error.operation,
            context=error.context,
            hint=error.hint,
        )


class _Until:
    """A deadline, or none: what is left of the time that a call may take."""

    __slots__ = ("_end",)

    def __init__(self, timeout_s: float | None) -> None:
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    def left(self) -> float | None:
        """Seconds, 0 when they are over."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def lock(self, lock: threading.Lock, operation: str) -> None:
        """Takes a lock before the deadline.

        Raises:
            TransferTimeoutError: Another thread held it all the time.
        """
        left = self.left()
        if not lock.acquire(timeout=-1 if left is None else left):
            raise TransferTimeoutError("another thread uses the pipe", operation=operation)
