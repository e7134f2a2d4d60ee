"""Starts engines in processes of their own, fast: it has imported everything and only forks.

It reads requests on the socket it is given, each with one end of a socket pair, and answers with the process id of the
child that serves it. It has no engine and no thread, so forking is safe. Its children are reaped by the kernel.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection

from attacks.host import Host

PR_SET_DUMPABLE = 4
CAP_SYS_PTRACE = 19


def untraceable() -> None:
    """Denies this process and its peers the memory of one another: root gives up the right to trace everybody."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    failed = libc.capget(header, data)
    for word in (0, 1):  # effective and permitted
        data[word] &= ~(1 << CAP_SYS_PTRACE)
    failed |= libc.capset(header, data)
    failed |= libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if failed:
        raise OSError(ctypes.get_errno(), "this process can't be made untraceable")


def serve(channel: Connection) -> None:
    """Carries out one call after the other until the test hangs up."""
    host = None
    while True:
        try:
            name, arguments, keywords = channel.recv()
        except EOFError:
            os._exit(0)
        try:
            if name == "start":
                if keywords.pop("alone", False):
                    untraceable()
                host = Host(**keywords)
                answer = None
            else:
                answer = getattr(host, name)(*arguments, **keywords)
            channel.send((True, answer))
        except Exception as error:  # noqa: BLE001 - the test is told
            channel.send((False, error))


def main() -> None:
    """Forks one server for each request."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 1, 1)
        if not message:
            return
        child = os.fork()
        if child == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(Connection(fds[0]))
        os.close(fds[0])
        requests.send(child.to_bytes(4, "little"))


if __name__ == "__main__":
    main()
