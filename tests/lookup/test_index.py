"""The token index as Python sees it. What it finds is held to a naive list in Rust; here: conversion and errors."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import pdkv
from pdkv._core import LookupIndex


def ints(*tokens):
    return np.array(tokens, np.int64)


def test_the_order_is_a_circle_and_what_is_put_back_is_next():
    index = LookupIndex()
    one, two, three = (index.insert(ints(token)) for token in (1, 2, 3))
    assert index.find(ints(2, 9)) == (two, 1)
    index.take(two)
    assert index.entries() == [three, one]
    assert index.front() == three
    index.put_back(two)
    assert index.entries() == [two, three, one]
    index.remove(two)
    assert len(index) == 2
    assert index.find(ints(2, 9)) is None


def test_the_longest_prefix_is_found_when_asked_for():
    index = LookupIndex()
    short, long = index.insert(ints(1)), index.insert(ints(1, 2, 3, 4))
    assert index.find(ints(1, 2, 3)) == (short, 1)
    assert index.find(ints(1, 2, 3), longest=True) == (long, 3)
    assert index.find(ints()) is None


@pytest.mark.parametrize(
    "tokens",
    [
        ints(5, 6, 7),
        memoryview(ints(5, 6, 7)),
        np.arange(40, dtype=np.int64)[5:29:8] // 8 + 5,
        ints(5, 6, 7)[::-1][::-1],
    ],
    ids=["numpy", "buffer", "strided", "reversed"],
)
def test_tokens_come_in_any_int64_memory(tokens):
    index = LookupIndex()
    entry = index.insert(tokens)
    assert index.find(ints(5, 6, 7)) == (entry, 3)


@pytest.mark.parametrize(
    "tokens", [np.zeros(3, np.int32), np.zeros(3), np.zeros((2, 2), np.int64), [1, 2], None], ids=str
)
def test_other_tokens_are_refused(tokens):
    with pytest.raises(pdkv.LayoutError, match="tokens"):
        LookupIndex().insert(tokens)


def test_what_is_not_there_is_a_typed_error():
    index = LookupIndex()
    entry = index.insert(ints(1))
    with pytest.raises(pdkv.InternalError, match="taken"):
        index.put_back(entry)
    with pytest.raises(pdkv.ConfigError, match="entry"):
        index.take(-1)


def test_long_prompts_and_many_threads():
    index = LookupIndex()
    prompts = [np.full(40_000, number, np.int64) for number in range(8)]

    def work(tokens):
        for _ in range(20):
            entry = index.insert(tokens)
            assert index.find(tokens[:100], longest=True) == (entry, 100)
            index.take(entry)
            index.put_back(entry)
            index.remove(entry)

    threads = [threading.Thread(target=work, args=(tokens,)) for tokens in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index) == 0
