"""Places to listen at that are still free when a test comes back to them."""

from __future__ import annotations

import itertools
import os

__all__ = ["host_of_its_own"]

_count = itertools.count(1)


def host_of_its_own() -> str:
    """A loopback address that nobody else uses: a port of it that is let go is given to nobody meanwhile."""
    # Whoever asks for any port of 127.0.0.1 never gets one of these. Those below 128 are the Rust tests'.
    return f"127.{128 + next(_count) % 100}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
