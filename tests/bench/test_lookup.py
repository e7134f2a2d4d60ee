"""`pdkv bench --mode lookup`: the parts by themselves, and all of it with a stand-in for the library."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from bench.fake import World
from bench.test_cases import CASE
from pdkv.bench import producer, tensor_floors
from pdkv.bench.lookup import blocks, measure
from pdkv.bench.lookup.prompts import Prompts
from pdkv.bench.lookup.scan import Scan
from pdkv.bench.measure import Bench
from pdkv.errors import ConfigError, PdkvError

PROMPTS = Prompts(entries=12, tokens=16, library="numpy", seed=5)
BLOCKS = replace(CASE, op="pull", transport="shm", requests=1)


@contextmanager
def bench(world, **options):
    with producer.threaded(world.kit, 120.0) as channel:
        yield Bench(world.kit, channel, **{"iters": 2, **options})
    assert (world.open_engines, world.open_buffers) == (0, 0)


def test_prompts_are_drawn_alike_everywhere_and_differ_in_their_second_half():
    drawn = PROMPTS.draw()
    assert all(np.array_equal(one, again) for one, again in zip(drawn, PROMPTS.draw(), strict=True))
    assert len({tuple(tokens[:8]) for tokens in drawn}) == 1
    assert len({tuple(tokens[8:]) for tokens in drawn}) == len({tokens[8] for tokens in drawn}) == 12
    assert Prompts.from_json(PROMPTS.to_json()) == PROMPTS
    for change in ({"entries": 3}, {"tokens": 0}, {"library": "os"}, {"entries": 1 << 20, "tokens": 1 << 20}):
        with pytest.raises(ConfigError):
            replace(PROMPTS, **change)


def test_the_scan_takes_the_first_that_matches_and_leaves_a_circle():
    scan = Scan("numpy")
    everything = np.ones(4, dtype=bool)
    for i in range(4):
        scan.insert(np.arange(4) + 10 * i, everything, i, i, None)
    assert scan.drop_select(np.arange(4) + 20, everything)[2] == 2
    assert scan.drop_select(np.arange(4) + 20, everything) is None
    assert [entry[2] for entry in scan._entries] == [3, 0, 1]
    # A prefix matches in both directions, and a mask leaves tokens out.
    assert scan.drop_select(np.arange(2), np.ones(2, dtype=bool))[2] == 0
    assert scan.drop_select(np.array([7, 10, 9, 11]), np.array([False, True, False, True]))[2] == 1


@pytest.mark.parametrize("position", measure.POSITIONS)
def test_the_order_is_that_of_the_scan(position):
    scan, order = Scan("numpy"), measure.Order(12, seed=5)
    drawn, mask = PROMPTS.draw(), PROMPTS.mask()
    here = measure.Here(scan, PROMPTS, drawn)
    for turn in range(30):
        place = order.pick(position)
        number = order.move(place)
        assert np.array_equal(scan._entries[place][0], drawn[number])
        if turn % 2:
            scan.take(place)
        else:
            assert here.select(drawn[number], mask)[2][0] == number
        here.put_back(number)
    assert order.pick("worst") == 10


def test_every_position_is_measured_everywhere():
    with bench(World()) as runner:
        lines = measure.run(runner, PROMPTS, [], lambda text: None)
    assert [line.what for line in lines[::4]] == [f"{where} of 12 x 16 tokens" for where in measure.POSITIONS]
    for ours, index, there, scan in zip(*(lines[i::4] for i in range(4)), strict=True):
        assert [line.name for line in (ours, index, there)] == [measure.LOCAL, measure.INDEX, measure.REMOTE]
        assert (scan.kind, scan.name) == ("peer", f"scan, numpy {np.__version__}")
        assert (ours.path, there.path, scan.path) == ("-", "stream", "-")
        assert (ours.iters, scan.iters) == (2 * measure._PER_SCAN, 2)
        assert scan.pdkv_ratio == pytest.approx(scan.p50_us / ours.p50_us, rel=0.02)
        assert {line.wrong for line in (ours, index, there, scan)} == {0}
        assert (ours.gb_per_s, ours.ratio) == (None, None)


def test_another_entry_than_the_one_asked_for_is_counted():
    with bench(World("other entry")) as runner:
        lines = measure.run(runner, PROMPTS, [], lambda text: None)
    wrong = {line.name: line.wrong for line in lines}
    assert wrong[measure.LOCAL] == wrong[measure.REMOTE] == 3 * measure._PER_SCAN
    assert wrong[measure.INDEX] == 0


@pytest.mark.parametrize("path", ["shm", "cma", "tcp"])
def test_blocks_are_selected_beside_a_pull_and_the_limit(path):
    with bench(World(path=path)) as runner:
        select, pull, limit = blocks.lines(runner, replace(BLOCKS, transport=path))
    assert [(line.kind, line.name) for line in (select, pull)] == [("pdkv", "drop_select_into"), ("pdkv", "pull")]
    assert (limit.kind, limit.path, select.total_bytes) == ("limit", path, BLOCKS.total_bytes)
    assert select.limit_gb_per_s == limit.gb_per_s
    assert select.ratio == pytest.approx(limit.p50_us / select.p50_us, rel=0.05)
    assert {line.wrong for line in (select, pull, limit)} == {0}
    assert (select.iters, pull.iters, limit.iters) == (2, 2, 2)


def test_wrong_blocks_are_counted_and_a_wrong_match_ends_the_run(capsys):
    with bench(World("flip", transfer=2), limits=False) as runner:
        select, pull = blocks.lines(runner, BLOCKS)
    assert select.wrong + pull.wrong == 1
    assert "wrong: " in capsys.readouterr().err
    with pytest.raises(PdkvError, match="tokens matched"), bench(World("short match")) as runner:
        blocks.lines(runner, BLOCKS)


def test_only_pulls_of_one_request_select_blocks():
    for case in (replace(BLOCKS, op="push"), replace(BLOCKS, requests=2)):
        with bench(World()) as runner, pytest.raises(ConfigError, match="one request"):
            blocks.lines(runner, case)


def test_floors_hold_lookups_to_the_scan():
    with bench(World()) as runner:
        lines = measure.run(runner, PROMPTS, [], lambda text: None)
    scan, ours = lines[3], [replace(line, p50_us=10.0) for line in lines[:3]]
    good = [*ours, replace(scan, p50_us=1000.0)]
    assert [floor.ok for floor in tensor_floors.lookup_floors(good)] == [True, True]
    assert [floor.value for floor in tensor_floors.lookup_floors(good)] == ["100x", "100x"]
    slow = [ours[0], ours[1], replace(ours[2], p50_us=11.0), good[3]]
    assert [floor.ok for floor in tensor_floors.lookup_floors(slow)] == [True, False]
    wrong = [replace(ours[0], wrong=1), *ours[1:], good[3]]
    assert [floor.ok for floor in tensor_floors.lookup_floors(wrong)] == [False, True]
