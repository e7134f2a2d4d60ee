import numpy as np
import pytest

from bench.fake import Native
from pdkv.bench import pattern
from pdkv.bench.pattern import Origin


def natives():
    yield pytest.param(None, id="reference")
    yield pytest.param(Native(), id="stand-in")
    try:
        from pdkv import _core
    except ImportError:
        return
    yield pytest.param(_core, id="native")


def u64(*values):
    return np.array(values, dtype=np.uint64)


def keys_of(stamp, blocks, layer=2, seed=7):
    blocks = np.asarray(blocks, dtype=np.uint64)
    return pattern.keys(seed, stamp, np.full(len(blocks), layer, dtype=np.uint64), blocks)


@pytest.fixture(params=natives())
def native(request):
    return request.param


@pytest.fixture(params=[1, 7, 8, 24, 1000, 4096, 65536], ids=lambda size: f"{size}B")
def page_bytes(request):
    return request.param


def test_a_key_names_its_page():
    for origin in (Origin(0, 0, 0, 0), Origin(7, 4095, 4095, 2**32 - 1), Origin(255, 1, 31, 123_456)):
        key = pattern.keys(origin.seed, origin.stamp, u64(origin.layer), u64(origin.block))
        assert pattern.origin(int(key[0])) == origin


def test_filled_pages_are_right_and_lie_where_they_should(native, page_bytes):
    memory = np.zeros(page_bytes * 10, np.uint8)
    offsets, keys = u64(*(page_bytes * i for i in (7, 2, 5))), keys_of(3, [1, 2, 3])
    pattern.fill(memory, offsets, page_bytes, keys, native, 2)
    assert pattern.find_wrong(memory, offsets, page_bytes, keys, native, 2) == pattern.Found(0, 0, [])
    rows = memory.reshape(10, page_bytes)
    for row, key in zip((7, 2, 5), keys.tolist(), strict=True):
        assert np.array_equal(rows[row], pattern.page(key, page_bytes))
    assert not rows[[0, 1, 3, 4, 6, 8, 9]].any()


def test_every_single_flipped_bit_is_seen(native):
    memory = np.zeros(64 * 4, np.uint8)
    offsets, keys = u64(0, 64, 128, 192), keys_of(1, [9, 8, 7, 6])
    pattern.fill(memory, offsets, 64, keys, native, 1)
    for byte in range(0, 256, 5):
        memory[byte] ^= 1 << byte % 8
        found = pattern.find_wrong(memory, offsets, 64, keys, native, 1)
        assert (found.pages, found.wrong_bytes) == (1, 1)
        assert (found.traced[0].position, found.traced[0].first_byte) == (byte // 64, byte % 64)
        memory[byte] ^= 1 << byte % 8


def test_stale_bytes_name_their_page(native):
    memory = np.zeros(4096 * 2, np.uint8)
    offsets = u64(0, 4096)
    pattern.fill(memory, offsets, 4096, keys_of(1, [40, 41]), native, 1)
    found = pattern.find_wrong(memory, offsets, 4096, keys_of(2, [40, 41]), native, 1)
    assert found.pages == 2
    assert found.traced[1].expected == Origin(7, 2, 2, 41)
    assert found.traced[1].found == (Origin(7, 1, 2, 41), found.traced[1].first_byte // 8 * 8)


def test_shifted_bytes_name_their_offset(native):
    memory = np.zeros(4096, np.uint8)
    keys = keys_of(5, [77])
    pattern.fill(memory, u64(0), 4096, keys, native, 1)
    memory[1024:2048] = memory[2048:3072].copy()
    wrong = pattern.find_wrong(memory, u64(0), 4096, keys, native, 1).traced[0]
    assert (wrong.first_byte // 8 * 8, wrong.found) == (1024, (Origin(7, 5, 2, 77), 2048))
    assert "layer 2 block 77 stamp 5" in str(wrong)


def test_foreign_bytes_are_called_so(native):
    memory = np.zeros(4096, np.uint8)
    wrong = pattern.find_wrong(memory, u64(0), 4096, keys_of(5, [77]), native, 1).traced[0]
    assert wrong.found is None
    assert "no known origin" in str(wrong)


def test_many_wrong_pages_are_counted_and_few_traced(native):
    memory = np.zeros(64 * 100, np.uint8)
    offsets = np.arange(100, dtype=np.uint64) * np.uint64(64)
    found = pattern.find_wrong(memory, offsets, 64, keys_of(1, range(100)), native, 2)
    assert found.pages == 100
    assert found.wrong_bytes > 6000
    assert 0 < len(found.traced) < 10


def test_a_page_outside_the_memory_is_refused(native):
    for call in (pattern.fill, pattern.find_wrong):
        with pytest.raises(ValueError, match="ends after"):
            call(np.zeros(100, np.uint8), u64(64), 64, keys_of(1, [1]), native, 1)
