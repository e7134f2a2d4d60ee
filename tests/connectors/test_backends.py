"""Caches of every attention backend of vLLM: a block goes over byte for byte, or is refused with a reason.

Real engines, and memory laid out as `backends` says; neither vLLM nor torch.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from connectors.backends import TABLE, Row, allocate, config_of, full, latent
from connectors.exchange import RANKS, expected, offer, one_order, order, pairs
from connectors.sides import until
from pdkv.connectors import vllm_caches
from pdkv.connectors.core.caches import GroupCache
from pdkv.connectors.core.config import Settings
from pdkv.connectors.core.line import Line
from pdkv.connectors.core.places import Places
from pdkv.connectors.core.work import ProducerAddress
from pdkv.connectors.core.worker import WorkerSide
from pdkv.errors import LayoutError, UnsupportedError

ROWS = {row.backend: row for row in TABLE}


@pytest.fixture(autouse=True)
def torch(monkeypatch):
    """What is asked of torch: a view with other strides, and one of the bytes."""
    module: Any = ModuleType("torch")

    def as_strided(tensor, size, strides):
        steps = [stride * tensor.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(tensor, size, steps, subok=True)

    module.as_strided, module.uint8, module.Tensor = as_strided, np.uint8, type("Tensor", (), {})
    monkeypatch.setitem(sys.modules, "torch", module)


class End:
    """One engine over the memory of a row in a layout."""

    def __init__(self, row: Row, layout: str, stack: ExitStack, name: str, model: str = "m") -> None:
        self.row = row
        self.memory, self.tensors = allocate(row, layout)
        self.config = config_of(row)
        how = {"model": model, "device": "cuda", "cache_dtype": row.cache_dtype}
        self.caches: list[GroupCache] = vllm_caches.group_caches(self.tensors, self.config, **how, **RANKS)
        groups = len(row.groups)
        self.worker = WorkerSide(name, Settings(adopt=False), self.caches, num_groups=groups, **RANKS)
        stack.callback(self.worker.close)
        self.sent, self.received, self.failed = set[str](), set[str](), set[str]()

    def look(self) -> None:
        results = self.worker.results()
        self.sent |= results.sent
        self.received |= results.received
        self.failed |= results.failed


def give(p: End, stack: ExitStack, request_id: str = "p-1") -> tuple[ProducerAddress, Any]:
    """Exports blocks of every group; gives where, and the references."""
    producer, references, work = offer(p.worker.info, len(p.row.groups), stack, request_id)
    p.worker.carry(work)
    return producer, references


def fetch(d: End, producer: ProducerAddress, references: Any, request_id: str = "d-1") -> None:
    d.worker.carry(order(len(d.row.groups), producer, references, request_id))
    until(lambda: (d.look(), request_id in d.received)[1])


@contextmanager
def ends(row: Row, here: str, there: str, **how: Any) -> Any:
    with ExitStack() as stack:
        p, d = End(row, here, stack, "p", **how), End(row, there, stack, "d")
        p.memory[:] = np.random.default_rng(7).integers(1, 256, p.memory.size, np.uint8)
        d.memory[:] = 0xEE
        yield p, d, stack


@pytest.mark.parametrize("name", ROWS)
def test_a_block_goes_over_byte_for_byte(name):
    row = ROWS[name]
    for here, there in pairs(row):
        with ends(row, here, there) as (p, d, stack):
            if row.packed and not one_order(row, here, there):
                with pytest.raises(LayoutError, match="model of group 0"):
                    reach(p, d, stack)
                continue
            want = expected(p, d)
            producer, references = give(p, stack)
            fetch(d, producer, references)
            assert not d.failed
            wrong = np.flatnonzero(d.memory != want)
            assert not wrong.size, f"{here} to {there}: {wrong.size} wrong bytes, the first at {wrong[0]}"
            until(lambda p=p: (p.look(), p.sent)[1])


def reach(p: End, d: End, stack: ExitStack) -> None:
    """Dials the producer, which compares what the caches mean."""
    producer, _ = give(p, stack)
    line = Line(producer, d.worker._engine, d.worker._kit.place, Places(None), 30.0)
    line.reach(p.worker.info.incarnation, float("inf"))


def test_the_indexers_keys_are_a_cache_of_their_own():
    row = ROWS["FLASHMLA_SPARSE and DeepSeek V3.2's indexer"]
    with ends(row, "LBHNC", "LBHNC") as (p, _, _):
        assert [(cache.group, len(cache.tensors)) for cache in p.caches] == [(0, 3), (0, 2)]
        mla, indexer = p.worker.info.groups
        assert [facts["cache"] for facts in (mla, indexer)] == ["0.0", "0.1"]
        assert (mla["content_bytes"], indexer["content_bytes"]) == (656, 132)
        assert mla["fingerprint"] != indexer["fingerprint"]
        assert "cache_role=indexer" in str(indexer["model"])
        assert p.worker.info.cache_groups == (0, 0)


def test_groups_that_are_alike_tell_what_earlier_releases_tell():
    with ends(ROWS["FLASH_ATTN"], "LBHNC", "LBHNC") as (p, _, _):
        (facts,) = p.worker.info.groups
        mode = spec_mode(p)
        assert facts["model"] == (
            f"m|cuda|FullAttentionSpec(block_size=16,num_kv_heads=2,head_size=32,dtype=bfloat16,kv_quant_mode={mode})#0"
        )
        assert "cache" not in facts
        assert p.worker.info.cache_groups == ()


def spec_mode(end: End) -> Any:
    return end.config.kv_cache_groups[0].kv_cache_spec.kv_quant_mode


def test_what_is_missing_at_one_end_is_named():
    with_indexer = ROWS["FLASHMLA_SPARSE and DeepSeek V3.2's indexer"]
    without = replace(with_indexer, groups=((with_indexer.groups[0][0],),))
    with ExitStack() as stack:
        p, d = End(without, "LBHNC", stack, "p"), End(with_indexer, "LBHNC", stack, "d")
        with pytest.raises(LayoutError) as refused:
            reach(p, d, stack)
    assert "0.1: 2 x 132 bytes uint8` here and `0: 3 x 656 bytes uint8` there" in refused.value.message


def test_an_indexer_of_another_width_is_named():
    row = ROWS["FLASHMLA_SPARSE and DeepSeek V3.2's indexer"]
    other = replace(row, groups=((row.groups[0][0], latent(68, dtype="uint8", cache_role="indexer")),))
    with ExitStack() as stack:
        p, d = End(other, "LBHNC", stack, "p"), End(row, "LBHNC", stack, "d")
        with pytest.raises(LayoutError, match=r"content_bytes of group 0\.1 is `132` here and `68` there"):
            reach(p, d, stack)


def test_a_load_fails_if_one_of_a_groups_caches_does():
    """The references of the two are swapped: each is for blocks of the other's meaning."""
    row = ROWS["FLASHMLA_SPARSE and DeepSeek V3.2's indexer"]
    with ends(row, "LBHNC", "LBHNC") as (p, d, stack):
        producer, (own,) = give(p, stack)
        fetch(d, producer, (own[::-1],))
        assert d.failed == {"d-1"}
        assert (d.memory == 0xEE).all()


@pytest.mark.parametrize(("theirs", "fits"), [("fp8_e4m3", True), ("fp8_e5m2", False), ("auto", False)])
def test_kinds_of_fp8_are_told_apart(theirs, fits):
    row = ROWS["FLASH_ATTN, fp8"]
    with ExitStack() as stack:
        p, d = End(replace(row, cache_dtype=theirs), "LBHNC", stack, "p"), End(row, "LBHNC", stack, "d")
        if fits:
            reach(p, d, stack)
        else:
            with pytest.raises(LayoutError, match="model of group 0"):
                reach(p, d, stack)


@pytest.mark.parametrize(
    ("backend", "layout"),
    [("FLASHINFER, nvfp4", "LHBNC"), ("FLASHINFER, nvfp4", "BHLNC"), ("kernel blocks smaller than vLLM's", "LHBNC")],
)
def test_packed_blocks_in_pieces_are_refused(backend, layout):
    """Those of vLLM refuse these themselves."""
    tensors = allocate(ROWS[backend], layout)[1]
    with pytest.raises(LayoutError, match="lie in pieces"):
        vllm_caches.group_caches(tensors, config_of(ROWS[backend]), **RANKS)


@pytest.mark.parametrize(("cache_dtype", "axes"), [("nvfp4", "BC"), ("fp8", "BHNC")])
def test_where_a_specification_does_not_say_how_it_is_quantised_the_setting_does(cache_dtype, axes):
    tensors, config = allocate(ROWS["FLASHINFER, nvfp4"], "LBHNC")[1], config_of(ROWS["FLASHINFER, nvfp4"])
    del config.kv_cache_groups[0].kv_cache_spec.kv_quant_mode
    (cache,) = vllm_caches.group_caches(tensors, config, cache_dtype=cache_dtype, **RANKS)
    assert cache.layout == axes


def test_packed_layers_in_another_order_are_a_cache_of_their_own():
    """Equal numbers of bytes are not equal bytes: one end may have the orders the other way round."""
    backend = ROWS["FLASHINFER, nvfp4"]
    tensors, others = allocate(backend, "LBHNC")[1], allocate(backend, "LBNHC")[1]
    assert len(tensors) > 1
    name = next(iter(tensors))
    caches = vllm_caches.group_caches(tensors | {name: others[name]}, config_of(backend), **RANKS)
    assert [list(cache.tensors) for cache in caches] == [[name], [other for other in tensors if other != name]]


def one_group(spec: str, *, host_resident: bool = False) -> SimpleNamespace:
    config = config_of(Row("", "", ((replace(full(), spec=spec),),)))
    config.kv_cache_groups[0].host_resident = host_resident
    return config


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("MambaSpec", "states"),
        ("CircularBufferSpec", "one block for each request"),
        ("CrossAttentionSpec", "encoder's input"),
        ("HiSparseHotSpec", "copies"),
    ],
)
def test_what_is_no_cache_of_a_prompts_tokens_is_refused_on_both_sides(spec, why):
    config = one_group(spec)
    for refuse in (
        lambda: vllm_caches.block_tokens(config),
        lambda: vllm_caches.group_caches({}, config, **RANKS),
    ):
        with pytest.raises(UnsupportedError, match=why) as refused:
            refuse()
        assert spec in refused.value.message


def test_one_layer_of_states_among_others_is_refused():
    row = Row("", "", ((full(), replace(full(layers=1), spec="MambaSpec")),))
    with pytest.raises(UnsupportedError, match="MambaSpec"):
        vllm_caches.block_tokens(config_of(row))


def test_hosts_pools_are_refused():
    with pytest.raises(UnsupportedError, match="pool of the host's"):
        vllm_caches.block_tokens(one_group("MLAAttentionSpec", host_resident=True))


def test_a_layer_without_a_tensor_is_refused():
    row = ROWS["FLASH_ATTN"]
    tensors = allocate(row, "LBHNC")[1]
    del tensors["g0.k0.1"]
    with pytest.raises(LayoutError, match=r"no tensor for layer `g0\.k0\.1`"):
        vllm_caches.group_caches(tensors, config_of(row), **RANKS)


@pytest.mark.parametrize("named", [True, False])
def test_layers_that_share_one_tensor_are_moved_once(named):
    row = ROWS["FLASH_ATTN"]
    tensors, config = allocate(row, "LBHNC")[1], config_of(row)
    tensors["shared"] = tensors["g0.k0.1"]
    if named:
        config.kv_cache_groups[0].layer_names.append("shared")
    (cache,) = vllm_caches.group_caches(tensors, config, **RANKS)
    assert list(cache.tensors) == ["g0.k0.0", "g0.k0.1"]


def test_a_stage_without_layers_of_a_group_has_no_cache_of_it():
    """As in pipeline parallelism."""
    row = ROWS["a sliding window's padded pages"]
    tensors, config = allocate(row, "LBHNC")[1], config_of(row)
    config.kv_cache_groups[0].layer_names.clear()
    assert [cache.group for cache in vllm_caches.group_caches(tensors, config, **RANKS)] == [1]
    config.kv_cache_groups[1].layer_names.clear()
    with pytest.raises(UnsupportedError, match="no layer with a KV cache"):
        vllm_caches.group_caches(tensors, config, **RANKS)


def test_what_is_said_of_many_kinds_of_layers_stays_short():
    kinds = tuple(full(heads, layers=1) for heads in range(1, 40))
    row = Row("", "", (kinds,), ("LBHNC",))
    tensors = allocate(row, "LBHNC")[1]
    names = {**RANKS, "model": "/models/" + 200 * "x"}
    caches = vllm_caches.group_caches(tensors, config_of(row), **names)
    assert len(caches) == len({cache.model for cache in caches}) == 39
    assert all(len(cache.model) <= 1000 for cache in caches)
    one_head = Row("", "", (tuple(latent(64, 16, quirk=number) for number in range(99)),), ("LBHNC",))
    (cache,) = vllm_caches.group_caches(allocate(one_head, "LBHNC")[1], config_of(one_head), **RANKS)
    assert len(cache.tensors) == 198
