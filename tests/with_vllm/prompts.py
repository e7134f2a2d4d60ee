"""Prompts of token ids that the vocabulary of every model here has."""

from __future__ import annotations

import random


def prompt(tokens, seed):
    """So many tokens, the same for the same seed; the first ones of a longer prompt are those of a shorter one."""
    return random.Random(seed).choices(range(2, 300), k=tokens)
