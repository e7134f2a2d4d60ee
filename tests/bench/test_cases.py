import json
from dataclasses import replace

import numpy as np
import pytest

from pdkv.bench import presets
from pdkv.bench.buffers import Pages
from pdkv.bench.cases import LAYOUTS, Axes, Case
from pdkv.bench.tables import Fragmentation
from pdkv.bench.ucx import Ucx
from pdkv.errors import ConfigError

CASE = Case(
    geometry=presets.preset("tiny"),
    op="pull",
    transport="shm",
    block_tokens=16,
    blocks=10,
    requests=2,
    threads=2,
    streams=1,
    fragmentation=Fragmentation(1),
    layout="LBHNC",
    memory="private",
    slots_factor=1.5,
    seed=1,
)
AXES = Axes(
    ops=("pull", "push"),
    transports=("shm", "tcp"),
    geometries=(presets.preset("tiny"), presets.preset("llama-3.1-8b")),
    block_tokens=(16,),
    isl=(100,),
    bursts=(1, 3),
    threads=(2,),
    streams=1,
    fragmentation=Fragmentation(1),
    layout="LBHNC",
    memory="auto",
    slots_factor=1.5,
    seed=1,
)


def test_cases_are_the_product_of_the_axes():
    cases = list(AXES.cases())
    assert len(cases) == len(set(cases)) == 16
    assert {case.blocks for case in cases} == {7}
    assert [case.transport for case in cases] == ["shm"] * 8 + ["tcp"] * 8


def test_sizes_of_a_case_agree():
    case = replace(CASE, geometry=presets.preset("llama-3.1-8b"))
    assert case.page_bytes == 65536
    assert case.pages == 32 * 20
    assert case.total_bytes == case.pages * case.page_bytes
    assert case.pool_bytes == 30 * 32 * 65536


def test_raw_blocks_fill_the_total():
    axes = replace(
        AXES, geometries=(presets.raw(4096), presets.raw(1 << 20)), block_tokens=(1,), bursts=(4,), total=64 << 20
    )
    assert {case.total_bytes for case in axes.cases()} == {64 << 20}
    with pytest.raises(ConfigError, match="holds no block"):
        list(replace(axes, total=4096).cases())


@pytest.mark.parametrize(
    ("memory", "transport", "where"),
    [
        ("auto", "auto", "pool"),
        ("auto", "shm", "pool"),
        ("auto", "cma", "private"),
        ("auto", "tcp", "private"),
        ("adopt", "shm", "adopt"),
    ],
)
def test_memory_suits_the_transport(memory, transport, where):
    assert replace(CASE, memory=memory, transport=transport).where == where


def test_a_case_survives_the_control_channel():
    assert Case.from_json(json.loads(json.dumps(CASE.to_json()))) == CASE
    tuned = replace(CASE, transport="ucx", ucx=Ucx("posix,cma", "any", 7, "libucp.so"))
    assert Case.from_json(json.loads(json.dumps(tuned.to_json()))) == tuned


@pytest.mark.parametrize(
    "change",
    [
        {"op": "steal"},
        {"transport": "carrier pigeon"},
        {"blocks": 0},
        {"blocks": -1},
        {"blocks": True},
        {"blocks": "10"},
        {"threads": 0},
        {"layout": "LHBNC"},
        {"memory": "gpu"},
        {"fragmentation": "runs:0"},
        {"slots_factor": 0.5},
        {"slots_factor": 1e9},
        {"blocks": 1 << 40},
        {"geometry": {}},
        {"geometry": None},
        {"geometry": {**CASE.to_json()["geometry"], "dtype": "int4"}},
        {"geometry": {**CASE.to_json()["geometry"], "layers": 5000}},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_bad_case_from_the_wire_is_refused(change):
    with pytest.raises(ConfigError):
        Case.from_json({**CASE.to_json(), **change})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["tiny", "deepseek-v3"])
def test_offsets_are_where_the_tensors_say(layout, model):
    case = replace(CASE, geometry=presets.preset(model), layout=layout)
    pages = Pages(case, engine=None)
    ids = np.array([3, 0, 29], dtype=np.int64)
    tensors = pages.tensors()
    assert list(tensors) == [f"layers.{i}" for i in range(case.geometry.layers)]
    offsets = pages.offsets(ids).reshape(case.geometry.layers, 3)
    for layer, tensor in enumerate(tensors.values()):
        assert tensor.shape == (30, case.geometry.kv_heads, 16, case.geometry.content)
        for i, block in enumerate(ids.tolist()):
            assert tensor[block].ctypes.data - pages.address == offsets[layer, i]
            assert tensor[block].nbytes == case.page_bytes


def test_writing_one_block_by_its_tensor_changes_just_its_pages():
    pages = Pages(replace(CASE, layout="BLNHC"), engine=None)
    everything = np.arange(30, dtype=np.int64)
    pages.fill(everything, 9, None)
    pages.tensors()["layers.2"][7] ^= 0xFFFF
    found = pages.find_wrong(everything, everything, 9, None)
    assert (found.pages, found.wrong_bytes) == (1, CASE.page_bytes)
    assert (found.traced[0].expected.layer, found.traced[0].expected.block) == (2, 7)


def test_others_are_the_rest_of_the_pool():
    pages = Pages(CASE, engine=None)
    assert pages.others(np.arange(1, 30)).tolist() == [0]
    assert len(pages.others(np.concatenate(CASE.tables("src")))) == 10
