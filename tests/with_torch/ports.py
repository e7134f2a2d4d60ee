"""Ports for pipes that meet at a port and its neighbours."""

from __future__ import annotations

import os
import random
import socket

# Of several processes with tests each has ports of its own, for one is free until its test has begun to use it.
_EACH = 3000
_FIRST = 20000 + _EACH * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4)


def free_ports(count):
    """The first of so many neighbouring ports of loopback that nobody uses, below those that the kernel hands out."""
    for first in random.sample(range(_FIRST, _FIRST + _EACH - count), 100):
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
