"""Ports of loopback for servers that want to be told theirs."""

from __future__ import annotations

import random
import socket
import time

_given = set()


def until_free(port, patience_s=120):
    """Waits until a server could listen there again."""
    deadline = time.monotonic() + patience_s
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                probe.listen()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.05)


def free_port():
    """A port that nobody uses and that this process hasn't given out, below those that the kernel hands out itself."""
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe:
            if port not in _given:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                _given.add(port)
                return port
    raise AssertionError("no port is free")
