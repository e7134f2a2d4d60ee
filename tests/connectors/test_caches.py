"""How a group's memory is registered: adopted where it can be, as it lies where it can't."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path

import numpy as np
import pytest

import pdkv
from pdkv.connectors.core.caches import GroupCache
from pdkv.connectors.core.config import Settings
from pdkv.connectors.core.worker import WorkerSide
from pdkv.errors import ConfigError, LayoutError

SHAPE = (16, 2, 16, 64)
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def memory(flags=PRIVATE):
    """Whole pages, private unless asked for others, filled."""
    array = np.frombuffer(mmap.mmap(-1, int(np.prod(SHAPE)) * 4, flags=flags), np.float32).reshape(SHAPE)
    array[...] = np.arange(array.size, dtype=np.float32).reshape(SHAPE)
    return array


def is_adopted(array):
    """Whether the kernel maps a memfd where the array begins."""
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return "memfd:" in line
    raise AssertionError(f"{address:#x} is not mapped")


def worker(array, *, layout="BHNC", group=True, user=True):
    return WorkerSide("w", Settings(adopt=user), [GroupCache({"layer": array}, layout, 16, adopt=group)])


@pytest.mark.parametrize(("group", "user"), [(True, True), (False, True), (True, False)])
def test_adopted_if_group_and_user_agree(group, user):
    array = memory()
    before = array.copy()
    side = worker(array, group=group, user=user)
    try:
        assert is_adopted(array) == (group and user)
        assert (array == before).all()
    finally:
        side.close()


def test_what_can_not_be_adopted_is_registered_as_it_lies(caplog):
    array = memory(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    with caplog.at_level(logging.WARNING, "pdkv.connectors"):
        side = worker(array)
    side.close()
    [record] = caplog.records
    assert "group `0` stays private" in record.getMessage()
    assert isinstance(record.args[1], pdkv.PdkvError)


def test_other_errors_are_the_same_without_adopting():
    with pytest.raises(LayoutError):
        worker(memory(), layout="BHN")


def test_setting_is_a_switch():
    with pytest.raises(ConfigError, match="`adopt` is the text `yes`"):
        Settings.of({"adopt": "yes"})
