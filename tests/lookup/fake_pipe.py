"""Two ends of a pipe within a process, with those methods of `pdkv.Pipe` that the lookup buffer needs."""

from __future__ import annotations

import queue

from pdkv.errors import ClosedError, PeerLostError, TransferTimeoutError

_BYE = object()


class FakePipe:
    def __init__(self, inbox, outbox):
        self._inbox, self._outbox = inbox, outbox
        self.closed = False
        self.refuse = None  # an error to raise instead of sending an entry

    def send_message(self, tag, tensors=(), timeout_s=None):
        self._check()
        if self.refuse is not None and tensors:
            raise self.refuse
        self._outbox.put((tag, list(tensors)))

    def recv_message(self, timeout_s=None):
        try:
            item = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TransferTimeoutError("nothing came", operation="recv_message") from None
        if item is _BYE:
            self._inbox.put(_BYE)
            self._check()
            raise PeerLostError("Connection closed by peer", operation="recv_message")
        return item

    def send_tensor(self, tensor):
        self.send_message(b"", [tensor])

    def recv_tensor(self):
        return self.recv_message()[1][0]

    def abort(self):
        self.closed = True
        self._inbox.put(_BYE)
        self._outbox.put(_BYE)

    close = abort

    def _check(self):
        if self.closed:
            raise ClosedError("the pipe was closed", operation="send_message")
        if self.peer.closed:
            raise PeerLostError("Connection closed by peer", operation="send_message")


def fake_pair():
    """The two ends."""
    here, there = queue.Queue(), queue.Queue()
    one, other = FakePipe(here, there), FakePipe(there, here)
    one.peer, other.peer = other, one
    return one, other
