"""Where a test that tries things at random begins, so that what one run finds another finds again."""

from __future__ import annotations

import os
import random

__all__ = ["FIXED", "seed"]

# CI sets it: what a change breaks fails there each time, and what nobody touched doesn't fail for the first time.
FIXED = os.environ.get("PDKV_TEST_SEED")


def seed() -> int:
    """A number for `random.Random`: what `PDKV_TEST_SEED` says, else another one each time, for the test to show."""
    return random.randrange(1 << 30) if FIXED is None else int(FIXED)
