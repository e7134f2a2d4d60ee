import numpy as np
import pytest

from pdkv.bench.tables import Fragmentation, block_tables, pool_blocks
from pdkv.errors import ConfigError


def runs(ids):
    return 1 + int(np.count_nonzero(np.diff(ids) != 1))


def draw(text="random", seed=1, end="src", requests=3, blocks=100, factor=2.0):
    how = Fragmentation.parse(text)
    pool = pool_blocks(requests * blocks, factor, how)
    return block_tables(seed, end, requests, blocks, pool, how), pool


@pytest.mark.parametrize("text", ["random", "none", "runs:1", "runs:7", "runs:16"])
def test_tables_are_distinct_ids_of_the_pool(text):
    tables, pool = draw(text)
    ids = np.concatenate(tables)
    assert [len(table) for table in tables] == [100] * 3
    assert len(np.unique(ids)) == 300
    assert ids.min() >= 0
    assert ids.max() < pool


def test_fragmentation_says_how_many_jumps():
    assert runs(draw("none")[0][0]) == 1
    assert runs(draw("random")[0][0]) > 90
    assert runs(draw("runs:16", blocks=160)[0][0]) <= 10


def test_seed_and_end_decide():
    def ids(**how):
        return np.concatenate(draw(**how)[0]).tolist()

    assert ids() == ids()
    assert ids() != ids(seed=2)
    assert ids() != ids(end="dst")


def test_an_exact_pool_is_enough():
    tables, pool = draw(factor=1.0)
    assert pool == 300
    assert sorted(np.concatenate(tables).tolist()) == list(range(300))


def test_a_pool_holds_whole_runs():
    assert pool_blocks(100, 1.0, Fragmentation(16)) == 112


def test_too_small_a_pool_is_refused():
    with pytest.raises(ConfigError, match="`9` blocks"):
        block_tables(1, "src", 1, 10, 9, Fragmentation(1))


@pytest.mark.parametrize("text", ["", "runs", "runs:", "runs:0", "runs:-3", "runs:x", "Random", "runs:²"])
def test_unknown_fragmentation_is_refused(text):
    with pytest.raises(ConfigError, match="fragmentation"):
        Fragmentation.parse(text)


@pytest.mark.parametrize("text", ["random", "none", "runs:16"])
def test_fragmentation_prints_as_it_is_written(text):
    assert str(Fragmentation.parse(text)) == text
