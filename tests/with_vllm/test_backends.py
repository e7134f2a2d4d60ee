"""The table of what vLLM's backends put into a KV cache, compared with the vLLM that is installed.

Its own specifications are made, customised by its backends where these can be imported without a GPU, and laid out by
its own code.
"""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm

from connectors.backends import BLOCKS, SIX, TABLE, Row, names_of, places_of
from connectors.releases import number
from pdkv.connectors import vllm_caches

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        number(".".join(vllm.__version__.split("+")[0].split(".")[:2])) != (0, 32), reason="the table is of vLLM 0.32"
    ),
]
ROWS = {row.backend: row for row in TABLE}
RANKS = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}


class Vllm:
    """What is needed of vLLM. Importing it brings warnings that are none of ours."""

    def __init__(self) -> None:
        self.interface = self.load("vllm.v1.kv_cache_interface")
        self.layouts = self.load("vllm.v1.kv_cache_layout").KVCacheLayout
        self.config_from_groups = self.load("vllm.v1.core.kv_cache_utils").get_kv_cache_config_from_groups
        self.allocate = self.load("vllm.v1.worker.utils").allocate_kv_cache

    def load(self, module: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)

    def backend_of(self, row: Row, at: int) -> Any:
        if at >= len(row.backends):
            return None
        module, _, name = row.backends[at].rpartition(".")
        return getattr(self.load(f"vllm.v1.attention.backends.{module}"), name)

    def spec_of(self, row: Row, group: int, at: int) -> Any:
        """The specification of a kind of layers, as their backend has it."""
        kind, facts = row.groups[group][at], dict(row.groups[group][at].facts)
        if "kv_quant_mode" in facts:
            facts["kv_quant_mode"] = self.interface.KVQuantMode[facts["kv_quant_mode"]]
        if "cache_role" in facts:
            facts["cache_role"] = self.interface.SparseCacheRole(facts["cache_role"])
        cls = getattr(self.interface, kind.spec)
        spec = cls(block_size=row.tokens[group], dtype=getattr(torch, kind.dtype), **facts)
        backend = self.backend_of(row, at) if group == 0 else None
        return spec if backend is None else backend.customize_spec(spec)

    def laid_out(self, row: Row, layout: str) -> tuple[Any, dict[str, torch.Tensor]]:
        """The configuration and the tensors that vLLM itself makes for a row."""
        groups = []
        for group, (kinds, names) in enumerate(zip(row.groups, names_of(row), strict=True)):
            specs = {name: self.spec_of(row, group, at) for at in range(len(kinds)) for name in names[at]}
            (first, *others) = specs.values()
            if len(kinds) > 1:
                several = self.interface.UniformTypeKVCacheSpecs.from_specs(specs)
                assert several is not None, "vLLM would not put these into one group"
            else:
                several = first.merge([first, *others])
            groups.append(self.interface.KVCacheGroupSpec(list(specs), several))
        resolved = self.layouts[layout]
        config = SimpleNamespace(
            attention_config=SimpleNamespace(hisparse_config=None),
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda: resolved,
                num_gpu_blocks_override=BLOCKS,
                prefix_cache_retention_interval=None,
            ),
        )
        caches = self.config_from_groups(config, groups, 1 << 30)
        kernels = [tokens // row.ratio for tokens in row.tokens]
        return caches, self.allocate(caches, torch.device("cpu"), resolved, kernels)


@pytest.fixture(scope="module")
def theirs() -> Vllm:
    return Vllm()


@pytest.mark.parametrize("name", ROWS)
def test_the_table_is_what_vllm_does(theirs, name):
    row = ROWS[name]
    for layout in row.layouts:
        caches, tensors = theirs.laid_out(row, layout)
        start = min(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
        found = {
            layer: (
                tensor.data_ptr() - start,
                (*tensor.shape[:3], tensor.shape[3] * tensor.element_size()),
                tuple(step * tensor.element_size() for step in tensor.stride()[:3]),
            )
            for layer, tensor in tensors.items()
        }
        _, places = places_of(row, layout)
        written = {layer: (offset, shape, strides[:3]) for layer, (_, offset, shape, strides) in places.items()}
        singles = {layer: tuple(at for at in range(3) if shape[at] > 1) for layer, (_, shape, _) in written.items()}
        for layer, (offset, shape, strides) in written.items():
            told = found[layer]
            assert (told[0], told[1]) == (offset, shape), f"{layer} in {layout}"
            # Along an axis of one nothing is ever reached by its stride.
            for axis in singles[layer]:
                assert told[2][axis] == strides[axis], f"{layer} in {layout}, axis {axis}"
        grouped = vllm_caches.group_caches(tensors, caches, cache_dtype=row.cache_dtype, **RANKS)
        assert sum(len(cache.tensors) for cache in grouped) == len(tensors)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.backends])
def test_the_layouts_of_a_backend_are_those_of_the_table(theirs, name):
    row = ROWS[name]
    declared = [theirs.backend_of(row, at).supported_kv_cache_layouts() for at in range(len(row.backends))]
    told = set(SIX)
    for layouts in declared:
        told &= set(SIX if layouts is None else (layout.name for layout in layouts))
    assert set(row.layouts) <= told
    if len(row.groups[0]) == 1 and not row.packed:
        assert set(row.layouts) == told


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.ratio == 1])
def test_layouts_that_are_left_out_vllm_refuses(theirs, name):
    """Where layers of a model differ, vLLM wants their blocks in one stretch."""
    row = ROWS[name]
    if len(row.groups[0]) == 1:
        return
    for layout in ("LHBNC", "BHLNC"):
        with pytest.raises((ValueError, AssertionError)):
            theirs.laid_out(row, layout)
