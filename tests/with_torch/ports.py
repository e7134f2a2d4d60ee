"""Ports for pipes that meet at a port and its neighbours."""

from __future__ import annotations

import random
import socket


def free_ports(count):
    """The first of so many neighbouring ports of loopback that nobody uses, below those that the kernel hands out."""
    for first in random.sample(range(20000, 32000 - count), 100):
        if all(map(_is_free, range(first, first + count))):
            return first
    raise AssertionError(f"no {count} neighbouring ports are free")


def _is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
