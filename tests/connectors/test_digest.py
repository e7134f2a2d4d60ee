"""The digest of a prefix covers all that its KV depends on, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.connectors.core.digest import Media, prefix_digest, seal

TOKENS = list(range(100, 150))


def test_only_the_prefix_counts():
    assert prefix_digest(TOKENS, 40) == prefix_digest([*TOKENS[:40], 7], 40)
    assert prefix_digest(TOKENS, 40) != prefix_digest(TOKENS, 41)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.data())
def test_every_token_counts(tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[at] ^= 1
    assert prefix_digest(tokens, len(tokens)) != prefix_digest(other, len(tokens))


def test_all_that_the_kv_depends_on_counts():
    image = Media("abc", 10, 5)
    digests = {
        prefix_digest(TOKENS, 40),
        prefix_digest(TOKENS, 40, lora="sql"),
        prefix_digest(TOKENS, 40, cache_salt="sql"),
        prefix_digest(TOKENS, 40, lora="s", cache_salt="ql"),
        prefix_digest(TOKENS, 40, media=[image]),
        prefix_digest(TOKENS, 40, media=[image._replace(offset=11)]),
        prefix_digest(TOKENS, 40, media=[image._replace(hash="abd")]),
        prefix_digest(TOKENS, 40, media=[image, image._replace(offset=20)]),
    }
    assert len(digests) == 8


def test_what_lies_behind_the_prefix_does_not_count():
    behind = Media("abc", 40, 5)
    assert prefix_digest(TOKENS, 40, media=[behind]) == prefix_digest(TOKENS, 40)
    inside = [Media("a", 3, 2), Media("b", 9, 2)]
    assert prefix_digest(TOKENS, 40, media=inside) == prefix_digest(TOKENS, 40, media=inside[::-1])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_none_is_refused(token):
    with pytest.raises(OverflowError):
        prefix_digest([token], 1)


def test_the_encoding_stays_as_it_is():
    """Two releases compare these: a change here is a change of the protocol."""
    assert prefix_digest([1, 2, 3], 3, lora="l", cache_salt="s", media=[Media("m", 1, 1)]).hex() == (
        "b2c3b7d12e0e5a38312b24378ee8921cac66c7be2b46200b7301f743e7a8c30f"
    )
    assert seal({"b": 1, "a": [1, 2]}).hex() == "f587f5091b5841a33f9e6dafdf1f5e45"
