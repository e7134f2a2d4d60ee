"""How long an engine's exports last from now on; runs within the process of the engine."""

from __future__ import annotations


def last(host, lease_s):
    """Gives what the engine exports after this another lease."""
    host.core.scheduler.connector._scheduler._producer._lease_s = lease_s
