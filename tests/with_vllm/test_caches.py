"""Tensors as vLLM registers them, in every form that its releases use, as groups of pdkv's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import pdkv
from pdkv.connectors import vllm_caches
from pdkv.connectors.core.caches import register
from pdkv.errors import LayoutError, UnsupportedError

pytestmark = pytest.mark.vllm

BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 32, 64
RANKS = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}


class FullAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def config(*groups, tokens=TOKENS, blocks=BLOCKS, spec=FullAttentionSpec):
    kind = spec(block_size=tokens, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.float32)
    return SimpleNamespace(
        num_blocks=blocks,
        kv_cache_groups=[SimpleNamespace(layer_names=list(names), kv_cache_spec=kind) for names in groups],
    )


def registered(tensors, kv_cache_config):
    groups = vllm_caches.group_caches(tensors, kv_cache_config, **RANKS)
    return groups, [
        pdkv.resolve_layout(dict(group.tensors), layout=group.layout, block_tokens=group.block_tokens)
        for group in groups
    ]


def storage_of(layers, shape):
    whole = torch.zeros((layers, *shape))
    return {f"layers.{layer}": whole[layer] for layer in range(layers)}


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((BLOCKS, HEADS, TOKENS, CONTENT), "BHNC"),
        ((2, BLOCKS, TOKENS, HEADS, CONTENT // 2), "KBNHC"),
        ((BLOCKS, 2, TOKENS, HEADS, CONTENT // 2), "BKNHC"),
        ((BLOCKS, TOKENS, 576), "BNC"),
    ],
)
def test_the_forms_of_all_releases(shape, axes):
    groups, layouts = registered(storage_of(3, shape), config([f"layers.{layer}" for layer in range(3)]))
    assert [group.layout for group in groups] == [axes]
    assert (layouts[0].num_blocks, layouts[0].num_layers, layouts[0].block_tokens) == (BLOCKS, 3, TOKENS)
    assert layouts[0].block_bytes == 3 * 4 * torch.Size(shape).numel() // BLOCKS


def test_heads_first_in_memory_is_seen_by_strides():
    tensors = {"a": torch.zeros(BLOCKS, TOKENS, HEADS, CONTENT).transpose(1, 2)}
    _, (layout,) = registered(tensors, config(["a"]))
    assert (layout.num_heads, layout.block_tokens) == (HEADS, TOKENS)


def laid_out(order, layers, blocks=BLOCKS, heads=HEADS, tokens=TOKENS, content=CONTENT, dtype=torch.float32):
    """Layers as vLLM cuts them from one allocation, of which `order` names the axes from outside to inside."""
    extents = {"L": layers, "B": blocks, "H": heads, "N": tokens, "C": content}
    whole = torch.zeros([extents[axis] for axis in order], dtype=dtype)
    logical = whole.permute([order.index(axis) for axis in "LBHNC"])
    return {f"layers.{layer}": logical[layer] for layer in range(layers)}


# Axes in the memory of a GPU's cache, and what each of vLLM's attention backends puts into them.
ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
BACKENDS = {
    "FLASH_ATTN": {},
    "FLASHINFER": {"dtype": torch.float8_e4m3fn},
    "FLASHINFER, nvfp4: slots for keys, then for values": {"heads": 2 * HEADS, "dtype": torch.uint8},
    "TRITON_ATTN, with scales behind each token": {"content": CONTENT + 2},
    "FLASHMLA": {"heads": 1, "content": 576, "dtype": torch.bfloat16},
    "FLASHMLA, fp8": {"heads": 1, "content": 656, "dtype": torch.uint8},
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_in_every_order(backend, order):
    tensors = laid_out(order, 3, **BACKENDS[backend])
    groups, (layout,) = registered(tensors, config(list(tensors)))
    assert groups[0].layout == "BHNC"
    first = tensors["layers.0"]
    assert (layout.num_layers, layout.num_blocks, layout.num_heads) == (3, BLOCKS, first.shape[1])
    assert layout.block_bytes == 3 * first[0].numel() * first.element_size()


@pytest.mark.parametrize("orders", [("LBHNC", "LBNHC"), ("LBNHC", "BLNHC"), ("LHBNC", "BHLNC"), ("BLHNC", "LBHNC")])
def test_blocks_move_between_orders(orders):
    """As FlashInfer's NHD and HND, or a cache with all layers of a block in one place."""
    there, here = (laid_out(order, 3) for order in orders)
    for layer, tensor in enumerate(there.values()):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(layer)))
    with pdkv.Engine("p") as p, pdkv.Engine("d") as d:
        caches = []
        for engine, tensors in ((p, there), (d, here)):
            (group,), _ = registered(tensors, config(list(tensors)))
            caches.append(register(engine, group, "0", "m"))
        d.connect(str(p.address))
        export = caches[0].export([1, 4], num_tokens=2 * TOKENS, digest=b"d" * 48)
        caches[1].pull(export.reference, [5, 0], digest=b"d" * 48).wait(30)
    for name, tensor in there.items():
        assert torch.equal(here[name][5], tensor[1])
        assert torch.equal(here[name][0], tensor[4])
        assert not here[name][1:5].any()


@pytest.mark.parametrize(("order", "ratio"), [("LBHNC", 2), ("LBNHC", 4)])
def test_kernel_blocks_of_mla_and_of_attention_are_taken_as_bytes(order, ratio):
    """FlashMLA's of 64 tokens, CUTLASS's of 128, in a larger block of vLLM's."""
    for heads, content in ((1, 576), (HEADS, CONTENT)):
        tensors = laid_out(order, 2, ratio * BLOCKS, heads, TOKENS // ratio, content, torch.bfloat16)
        groups, (layout,) = registered(tensors, config(list(tensors)))
        assert groups[0].layout == "BC"
        assert (layout.num_blocks, layout.block_bytes) == (BLOCKS, 2 * 2 * heads * TOKENS * content)


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_kernel_blocks_in_pieces_are_refused(order):
    tensors = laid_out(order, 2, 2 * BLOCKS, HEADS, TOKENS // 2)
    with pytest.raises(LayoutError, match="lie in pieces"):
        vllm_caches.group_caches(tensors, config(list(tensors)), **RANKS)


def test_layers_of_different_sizes_in_one_group_are_caches_of_their_own():
    """An indexer's keys beside MLA's: what vLLM 0.32 makes of these is compared in `test_backends`."""
    tensors = {"mla": torch.zeros(BLOCKS, 1, TOKENS, 576), "indexer": torch.zeros(BLOCKS, 1, TOKENS, 132)}
    groups, layouts = registered(tensors, config(list(tensors)))
    assert [list(group.tensors) for group in groups] == [["mla"], ["indexer"]]
    assert [group.group for group in groups] == [0, 0]
    assert [layout.content_bytes for layout in layouts] == [4 * 576, 4 * 132]


def test_kernel_blocks_smaller_than_vllms_are_taken_as_bytes():
    """Two of the kernel's blocks make one of the scheduler's."""
    tensors = storage_of(2, (2 * BLOCKS, HEADS, TOKENS // 2, CONTENT))
    groups, (layout,) = registered(tensors, config(["layers.0", "layers.1"]))
    assert groups[0].layout == "BC"
    assert layout.num_blocks == BLOCKS
    assert layout.block_bytes == 2 * HEADS * TOKENS * CONTENT * 4
    view = groups[0].tensors["layers.1"]
    assert view.data_ptr() == tensors["layers.1"].data_ptr()
    tensors["layers.1"][2:4] = 1.0
    assert (view[1].view(torch.float32) == 1).all()
    assert not view[0].any()


def test_a_block_in_pieces_that_cannot_be_named_is_refused():
    tensors = {"a": torch.zeros(HEADS, 2 * BLOCKS, TOKENS // 2, CONTENT).transpose(0, 1)}
    with pytest.raises(LayoutError, match="`a` lie in pieces") as refused:
        vllm_caches.group_caches(tensors, config(["a"]), **RANKS)
    assert "VLLM_KV_CACHE_LAYOUT" in refused.value.hint


def test_groups_may_lie_on_the_same_memory():
    memory = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT)
    groups, layouts = registered({"full": memory, "window": memory.view_as(memory)}, config(["full"], ["window"]))
    assert [list(group.tensors) for group in groups] == [["full"], ["window"]]
    with pdkv.Engine("groups", listen=None) as engine:
        for group in groups:
            engine.register_kv_cache(dict(group.tensors), layout=group.layout, block_tokens=TOKENS, shard=group.shard)
    assert layouts[0] == layouts[1] or layouts[0].num_blocks == layouts[1].num_blocks


def test_memory_that_the_allocator_shares_out_is_not_adopted():
    groups, _ = registered(storage_of(3, (BLOCKS, HEADS, TOKENS, CONTENT)), config([f"layers.{i}" for i in range(3)]))
    assert [group.adopt for group in groups] == [False]
    large = storage_of(2, (1024, HEADS, TOKENS, CONTENT))
    groups, _ = registered(large, config(list(large), blocks=1024))
    assert [group.adopt for group in groups] == [True]


def test_groups_on_the_same_memory_adopt_it_together():
    whole = torch.zeros((2, 1024, HEADS, TOKENS, CONTENT))
    tensors = {f"{kind}.{layer}": whole[layer] for kind in ("full", "window") for layer in range(2)}
    names = [["full.0", "full.1"], ["window.0", "window.1"]]
    groups, _ = registered(tensors, config(*names, blocks=1024))
    whole[1, 7] = 7.0
    with pdkv.Engine("adopting", listen=None) as engine:
        caches = [register(engine, group, str(index), "m") for index, group in enumerate(groups)]
        assert len({cache.fingerprint for cache in caches}) == 2
    assert (whole[1, 7] == 7).all()
    assert not whole[0].any()


def test_layers_that_share_anothers_memory_are_left_out():
    tensors = storage_of(1, (BLOCKS, HEADS, TOKENS, CONTENT))
    groups, _ = registered({**tensors, "shared": tensors["layers.0"]}, config(["layers.0"]))
    assert list(groups[0].tensors) == ["layers.0"]


def test_a_group_that_is_not_transferred_is_left_out():
    kv_cache_config = config(["a"], ["b"])
    kv_cache_config.kv_cache_groups[0].enable_kv_transfer = False
    assert [index for index, _ in vllm_caches.transfer_groups(kv_cache_config)] == [1]


def test_states_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="MambaSpec"):
        vllm_caches.block_tokens(config(["mixer"], spec=MambaSpec))
    with pytest.raises(UnsupportedError, match="`a` is a `list`"):
        vllm_caches.group_caches({"a": [torch.zeros(1)]}, config(["a"]), **RANKS)


def meaning(tensors, kv_cache_config, **how):
    (group,) = vllm_caches.group_caches(tensors, kv_cache_config, **how, **RANKS)
    return group.model


def test_what_bytes_mean_names_the_model_the_device_and_every_group():
    tensors = storage_of(1, (BLOCKS, HEADS, TOKENS, CONTENT))
    tensors["a"] = tensors.pop("layers.0")
    text = meaning(tensors, config(["a"]), model="smol", device="cpu(vec)")
    assert text.startswith(
        "smol|cpu(vec)|FullAttentionSpec(block_size=32,num_kv_heads=2,head_size=32,dtype=torch.float32"
    )
    smaller = {"a": torch.zeros(BLOCKS, HEADS, TOKENS // 2, CONTENT)}
    assert text != meaning(smaller, config(["a"], tokens=TOKENS // 2), model="smol", device="cpu(vec)")


def test_bytes_in_another_order_mean_something_else():
    """Kernel blocks of half a block, heads first on one side and tokens first on the other."""
    heads_first = torch.zeros(2 * BLOCKS, HEADS, TOKENS // 2, CONTENT)
    tokens_first = torch.zeros(2 * BLOCKS, TOKENS // 2, HEADS, CONTENT).transpose(1, 2)
    texts = [meaning({"a": tensor}, config(["a"])) for tensor in (heads_first, tokens_first)]
    assert texts[0] != texts[1]
