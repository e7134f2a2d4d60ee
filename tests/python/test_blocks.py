"""Block ids in every form that Python gives them."""

from __future__ import annotations

import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdkv

LAYOUT = pdkv.resolve_layout({"a": np.zeros((64, 1, 16, 8), np.uint8)}, layout="BHNC", block_tokens=16)
BLOCK_BYTES = 16 * 8


def moved(ids):
    """How many bytes a plan from these ids moves."""
    return pdkv.plan(LAYOUT, ids, LAYOUT, list(range(len(ids)))).total_bytes


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_numpy_integers_of_every_width(dtype):
    assert moved(np.array([3, 1, 60], dtype)) == 3 * BLOCK_BYTES


@pytest.mark.parametrize("ids", [[3, 1, 60], (3, 1, 60), range(3), array.array("q", [3, 1, 60]), [np.int32(3), 1, 60]])
def test_sequences(ids):
    assert moved(ids) == 3 * BLOCK_BYTES


def test_strided_arrays_are_read_by_their_strides():
    ids = np.array([5, 99, 6, 99, 7, 99])[::2]
    assert pdkv.plan(LAYOUT, ids, LAYOUT, [0, 1, 2]).run_count == 1


def test_tensors_lend_a_numpy_view():
    class Tensor:
        def numpy(self):
            return np.array([1, 2])

        def __len__(self):
            return 2

    assert moved(Tensor()) == 2 * BLOCK_BYTES


def test_many_ids_take_the_other_way_through_the_door():
    ids = np.tile(np.arange(64), 1000)
    with pytest.raises(pdkv.LayoutError):
        pdkv.plan(LAYOUT, ids, LAYOUT, ids)  # 64,000 destinations in 64 blocks


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([1.0, 2.0]), "format `d`"),
        (np.array([[1, 2]]), "`2` dimensions"),
        (np.array([1, -2]), "-2"),
        (np.array([1, 64]), "64"),
        (np.array([0, 2**63], np.uint64), "index `1`|9223372036854775807"),
        ([1, "two"], "index `1` is a `str`"),
        ([1, 2.5], "index `1` is a `float`"),
        ([True, False], "index `0` is a `bool`"),
        ([1, True], "index `1` is a `bool`"),
        (np.array([True, False]), "format `\\?`"),
        ([1, 2**70], "index `1` is out of range"),
        (7, "are a `int`"),
        (None, "are a `NoneType`"),
    ],
)
def test_refusals_name_the_culprit(ids, message):
    with pytest.raises(pdkv.LayoutError, match=message):
        pdkv.plan(LAYOUT, ids, LAYOUT, [0, 1])


def test_errors_of_an_iterator_come_through():
    def ids():
        yield 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pdkv.plan(LAYOUT, ids(), LAYOUT, [0, 1])


@given(st.lists(st.integers(0, 63), min_size=1, max_size=64, unique=True))
def test_arrays_and_lists_agree(ids):
    target = list(range(len(ids)))
    plans = [
        pdkv.plan(LAYOUT, form, LAYOUT, target) for form in (ids, np.array(ids, np.uint32), np.array(ids, np.int32))
    ]
    assert len({(plan.run_count, plan.total_bytes, plan.explain()) for plan in plans}) == 1
