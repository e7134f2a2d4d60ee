"""From tensors and names to a layout, and from two layouts to a plan."""

from __future__ import annotations

import numpy as np
import pytest

import pdkv
from pdkv.layout import Layout, parse

B, H, N, C = 6, 2, 16, 32


def tensors(order="BHNC", layers=3, dtype=np.float16):
    """Per-layer [B, H, N, C] views that lie in memory as `order` says."""
    sizes = dict(zip("BHNC", (B, H, N, C), strict=True))
    views = {}
    for layer in range(layers):
        backing = np.zeros([sizes[axis] for axis in order], dtype)
        views[f"layers.{layer}"] = backing.transpose([order.index(axis) for axis in "BHNC"])
    return views


def resolve(given, layout="BHNC"):
    return pdkv.resolve_layout(given, layout=layout, block_tokens=N)


def test_what_a_layout_says_about_itself():
    layout = resolve(tensors())
    assert (layout.num_blocks, layout.num_layers, layout.num_heads, layout.block_tokens) == (B, 3, H, N)
    assert (layout.dtype, layout.content_bytes, layout.num_planes) == ("float16", 2 * C, 1)
    assert layout.block_bytes == 3 * H * N * C * 2
    assert layout.layer_names == ["layers.0", "layers.1", "layers.2"]
    assert layout.differences(resolve(tensors("HBNC"))) == []


@pytest.mark.parametrize("name", ["HND", "LBHNC", "LBNHC", "NHD", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_names_of_vllm_stand_for_views_that_lie_so(name):
    assert parse(name).axes == "BHNC"
    assert resolve(tensors(parse(name).order), name).num_blocks == B


def test_a_name_that_the_strides_contradict_is_refused():
    with pytest.raises(pdkv.LayoutError, match="lies as `BNHC` but the layout says `BHNC`"):
        resolve(tensors("BNHC"), "HND")


def test_axes_and_layout_objects():
    nhd = {name: view.transpose(0, 2, 1, 3) for name, view in tensors().items()}
    assert resolve(nhd, "BNHC").num_heads == H
    assert resolve(nhd, Layout("BNHC", order="BHNC")).num_heads == H
    assert pdkv.Layout is Layout


def test_keys_and_values_apart():
    pairs = {name: (view, view.copy()) for name, view in tensors().items()}
    assert resolve(pairs).num_planes == 2
    with pytest.raises(pdkv.LayoutError, match="`3` tensors"):
        resolve({"layers.0": (1, 2, 3)})


def test_lists_are_named_by_position():
    assert resolve(list(tensors().values())).layer_names == ["layers.0", "layers.1", "layers.2"]


def test_one_tensor_with_a_layer_axis():
    backing = np.zeros((B, 3, H, N, C), np.float16)
    layout = resolve(backing, "BLHNC")
    assert (layout.num_layers, layout.num_blocks) == (3, B)
    with pytest.raises(pdkv.LayoutError, match="`L` axis"):
        resolve(backing, "BHNC")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "no layers"),
        ({"a": np.zeros((B, H, N))}, "shape"),
        ({"a": np.zeros((B, H, N + 1, C))}, "block_tokens"),
        ({"a": np.zeros((B, H, N, C), np.complex64)}, "dtype|items"),
    ],
)
def test_contradictions_are_refused(given, message):
    with pytest.raises(pdkv.LayoutError, match=message):
        resolve(given)


def test_differences_name_fields_and_both_values():
    halves, singles = resolve(tensors()), resolve(tensors(dtype=np.float32))
    fields = {field: (ours, theirs) for field, ours, theirs in halves.differences(singles)}
    assert fields["dtype"] == ("float16", "float32")


def test_plan_counts_and_explains():
    plan = pdkv.plan(resolve(tensors()), [0, 1, 2], resolve(tensors()), [5, 3, 4])
    assert plan.total_bytes == 3 * 3 * H * N * C * 2
    assert plan.run_count == 3 * 2  # 1 and 2 are neighbours on both sides
    assert plan.memory_bytes < 10_000
    assert plan.explain()
    part = pdkv.plan(resolve(tensors()), [0], resolve(tensors()), [5], layers=(1, 1))
    assert part.total_bytes == H * N * C * 2


def test_shards_check_themselves():
    shard = pdkv.Shard(40, 4, first_layer=40, total_layers=80, tp_rank=1, tp_size=2)
    assert (shard.num_layers, shard.first_layer, shard.total_layers, shard.total_heads) == (40, 40, 80, 4)
    assert shard == pdkv.Shard(40, 4, first_layer=40, total_layers=80, tp_rank=1, tp_size=2)
    assert len({shard, pdkv.Shard(1, 1)}) == 2
    with pytest.raises(pdkv.LayoutError, match="tp_rank"):
        pdkv.Shard(1, 1, tp_rank=1)
