"""What vLLM's attention backends put into a KV cache, by shape and stride: a table, and the memory that it stands for.

The shapes are written down as vLLM 0.32 makes them (`compute_layer_kv_cache_shape_bytes` and `create_kv_cache_views` of
`v1/kv_cache_interface.py`, from the specification that a layer or its backend gives), those of older releases as their
`get_kv_cache_shape` gave them. `tests/with_vllm/test_backends.py` compares them with the vLLM that is installed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np

from connectors.stand_in import Tensor

SIX = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
# Where every block of a layer is one stretch: all that vLLM allows where layers differ.
COMPACT = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
BLOCKS = 8
_BYTES = {"uint8": 1, "int8": 1, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Kind:
    """Layers of one specification.

    Attributes:
        heads: Head slots of the tensor.
        rows: Rows of a block, for most backends one a token.
        content: Bytes of a slot and row.
        dtype: Type of the elements.
        layers: How many there are.
        page: Bytes from block to block where that is more than a block has.
        spec: Class of the specification.
        facts: Its other fields.
    """

    heads: int
    rows: int
    content: int
    dtype: str = "bfloat16"
    layers: int = 2
    page: int = 0
    spec: str = "FullAttentionSpec"
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def stride(self) -> int:
        """Bytes from block to block of a layer by itself."""
        return max(self.page, self.heads * self.rows * self.content)


@dataclass(frozen=True)
class Row:
    """One backend with one kind of model.

    Attributes:
        backend: Its name in vLLM, and what is special.
        source: Where in vLLM it is said.
        groups: Kinds of layers, by KV group.
        layouts: Those that it reads.
        tokens: Tokens in a block of the scheduler's, by group.
        ratio: Kernel blocks in one of these.
        backends: Module and class, for each kind of the first group, under `vllm.v1.attention.backends`.
        packed: Whether a block's rows can't be told apart, so that both ends need the same order.
    """

    backend: str
    source: str
    groups: tuple[tuple[Kind, ...], ...]
    layouts: tuple[str, ...] = SIX
    tokens: tuple[int, ...] = (16,)
    ratio: int = 1
    backends: tuple[str, ...] = ()
    packed: bool = False
    cache_dtype: str = "auto"


def full(heads: int = 2, size: int = 32, **facts: Any) -> Kind:
    """Layers with keys and values of `size` elements in bfloat16, unless said otherwise."""
    how = {name: facts.pop(name) for name in ("dtype", "layers", "rows", "content", "page") if name in facts}
    dtype = how.setdefault("dtype", "bfloat16")
    how.setdefault("rows", 16)
    how.setdefault("content", (size + facts.get("head_size_v", size)) * _BYTES[dtype])
    return Kind(facts.get("num_head_slots", heads), facts={"num_kv_heads": heads, "head_size": size, **facts}, **how)


def latent(content: int, rows: int = 64, dtype: str = "bfloat16", layers: int = 2, page: int = 0, **facts: Any) -> Kind:
    """MLA's layers, or an indexer's: one head."""
    facts = {"num_kv_heads": 1, "head_size": content // _BYTES[dtype], **facts}
    return Kind(1, rows, content, dtype, layers, page, "MLAAttentionSpec", facts)


_FP8 = {"kv_quant_mode": "FP8_PER_TENSOR"}
_INDEXER = latent(132, dtype="uint8", cache_role="indexer")  # 128 values and a scale of 4 bytes
_DS_FP8 = {"head_size": 576, "state_content_bytes": 656, "cache_dtype_str": "fp8_ds_mla", **_FP8}
_MLA, _INTERFACE = "model_executor/layers/attention/mla_attention.py", "v1/kv_cache_interface.py"
_BACKENDS = "v1/attention/backends"
_V32 = "model_executor/models/deepseek_v2.py (DeepseekV32IndexerCache)"

TABLE = [
    Row("FLASH_ATTN", f"{_BACKENDS}/flash_attn.py", ((full(),),), backends=("flash_attn.FlashAttentionBackend",)),
    # Scales, also those of single heads, come with the checkpoint.
    Row("FLASH_ATTN, fp8", f"{_BACKENDS}/flash_attn.py", ((full(dtype="uint8", **_FP8),),), cache_dtype="fp8"),
    Row(
        "FLASH_ATTN_DIFFKV",
        f"{_BACKENDS}/flash_attn_diffkv.py",
        ((full(size=24, head_size_v=16),),),
        backends=("flash_attn_diffkv.FlashAttentionDiffKVBackend",),
    ),
    Row("FLASHINFER", f"{_BACKENDS}/flashinfer.py", ((full(),),)),
    Row("FLASHINFER, SM100", f"{_BACKENDS}/flashinfer.py", ((full(dtype="uint8", **_FP8),),), ("LBHNC", "BLHNC")),
    # [K values | K scales | V values | V scales] within a block, by head or by token.
    Row(
        "FLASHINFER, nvfp4",
        f"{_BACKENDS}/flashinfer.py (customize_spec, _nvfp4_kv_views)",
        (
            (
                full(
                    dtype="uint8",
                    content=18,
                    kv_quant_mode="NVFP4",
                    num_head_slots=4,
                    state_content_bytes=18,
                ),
            ),
        ),
        COMPACT,
        packed=True,
        cache_dtype="nvfp4",
    ),
    Row("TRITON_ATTN", f"{_BACKENDS}/triton_attn.py", ((full(),),), backends=("triton_attn.TritonAttentionBackend",)),
    Row(
        "TRITON_ATTN, int8 with a scale a token and head",
        f"{_BACKENDS}/triton_attn.py (customize_spec)",
        ((full(dtype="int8", content=72, kv_quant_mode="INT8_PER_TOKEN_HEAD"),),),
        backends=("triton_attn.TritonAttentionBackend",),
        cache_dtype="int8_per_token_head",
    ),
    Row(
        "TRITON_ATTN, int4 with a scale a token and head",
        f"{_BACKENDS}/triton_attn.py (customize_spec)",
        ((full(dtype="uint8", content=40, kv_quant_mode="INT4_PER_TOKEN_HEAD"),),),
        backends=("triton_attn.TritonAttentionBackend",),
        cache_dtype="int4_per_token_head",
    ),
    Row(
        "FLEX_ATTENTION",
        f"{_BACKENDS}/flex_attention.py",
        ((full(),),),
        ("LBNHC",),
        backends=("flex_attention.FlexAttentionBackend",),
    ),
    Row(
        "HPC_ATTN",
        f"{_BACKENDS}/hpc_attn.py",
        ((full(rows=64),),),
        ("LBNHC",),
        (64,),
        backends=("hpc_attn.HpcAttentionBackend",),
    ),
    Row(
        "TURBOQUANT",
        f"{_BACKENDS}/turboquant_attn.py (customize_spec)",
        ((full(size=128, dtype="uint8", content=196, kv_quant_mode="TURBOQUANT_K8V4"),),),
        ("LBNHC",),
        backends=("turboquant_attn.TurboQuantAttentionBackend",),
        cache_dtype="turboquant_k8v4",
    ),
    # A plane of keys and one of values, each with all heads of a token side by side.
    Row(
        "B12X",
        f"{_BACKENDS}/b12x.py (customize_spec)",
        ((full(rows=64, content=128, num_head_slots=2, state_content_bytes=128),),),
        ("LBHNC", "BLHNC"),
        (64,),
        backends=("b12x.B12xPagedAttentionBackend",),
    ),
    # Keys and values of a head are packed for the instruction set.
    Row(
        "CPU_ATTN",
        f"{_BACKENDS}/cpu_attn.py",
        ((full(rows=32),),),
        ("LBHNC",),
        (32,),
        backends=("cpu_attn.CPUAttentionBackend",),
    ),
    Row("MLA: FLASHMLA, FLASHINFER_MLA, TRITON_MLA, CPU_MLA", _MLA, ((latent(1152),),), SIX, (64,)),
    Row("MLA: CUTLASS_MLA", _MLA, ((latent(1152, 128),),), SIX, (128,)),
    Row("MLA, fp8", _MLA, ((latent(576, dtype="uint8", **_FP8),),), SIX, (64,), cache_dtype="fp8"),
    Row(
        "TRITON_MLA, int8 with a scale a token",
        f"{_MLA} (MLACommonBackend.customize_spec)",
        ((latent(584, dtype="int8", head_size=576, kv_quant_mode="INT8_PER_TOKEN_HEAD"),),),
        SIX,
        (64,),
        backends=("mla.triton_mla.TritonMLABackend",),
        cache_dtype="int8_per_token_head",
    ),
    # The indexer's keys in a block: all values, then all scales.
    Row(
        "FLASHMLA_SPARSE and DeepSeek V3.2's indexer",
        f"{_MLA} (get_kv_cache_spec), {_V32}",
        ((latent(656, dtype="uint8", layers=3, **_DS_FP8), _INDEXER),),
        COMPACT,
        (64,),
        backends=("mla.flashmla_sparse.FlashMLASparseBackend", "mla.indexer.DeepseekV32IndexerBackend"),
        cache_dtype="fp8_ds_mla",
    ),
    Row(
        "FLASHINFER_MLA_SPARSE and DeepSeek V3.2's indexer",
        f"{_BACKENDS}/mla/flashinfer_mla_sparse.py, {_V32}",
        ((latent(576, dtype="uint8", **_FP8), _INDEXER),),
        COMPACT,
        (64,),
        cache_dtype="fp8",
    ),
    Row("sparse MLA in bfloat16 and its indexer", f"{_MLA}, {_V32}", ((latent(1152), _INDEXER),), COMPACT, (64,)),
    Row(
        "sparse MLA in nvfp4_ds_mla and its indexer",
        f"{_MLA}, {_V32}",
        ((latent(352, dtype="uint8", head_size=576, state_content_bytes=352, kv_quant_mode="NVFP4_DS_MLA"), _INDEXER),),
        COMPACT,
        (64,),
        cache_dtype="nvfp4_ds_mla",
    ),
    Row(
        "FLASHMLA_SPARSE with kernel blocks of half a block, and the indexer",
        "v1/worker/utils.py (prepare_kernel_block_sizes)",
        ((latent(656, 128, "uint8", **_DS_FP8), latent(132, 128, "uint8", cache_role="indexer")),),
        ("LBHNC", "LBNHC"),
        (128,),
        2,
        packed=True,
        cache_dtype="fp8_ds_mla",
    ),
    Row(
        "kernel blocks smaller than vLLM's",
        "v1/worker/utils.py (prepare_kernel_block_sizes)",
        ((full(rows=64),),),
        ("LBHNC", "LBNHC"),
        (64,),
        4,
        packed=True,
    ),
    # Full attention and an indexer of one head: MiniMax M3's.
    Row(
        "MiniMax M3: attention and its indexer",
        "models/minimax_m3/common/indexer.py",
        ((full(4, 32, rows=128), latent(256, 128)),),
        COMPACT,
        (128,),
    ),
    Row(
        "layers that keep bfloat16 beside fp8",
        "kv_cache_dtype_skip_layers",
        ((full(dtype="uint8", **_FP8), full(layers=1)),),
        COMPACT,
        cache_dtype="fp8",
    ),
    Row(
        "heads that differ by layer, and a draft model's",
        f"{_INTERFACE} (UniformTypeKVCacheSpecs)",
        ((full(4), full(2, layers=1), full(2, 64, layers=1)),),
        COMPACT,
    ),
    # Pages of one group filled up to those of the other, which lies on the same memory.
    Row(
        "a sliding window's padded pages",
        "v1/core/kv_cache_utils.py (unify_kv_cache_spec_page_size)",
        (
            (full(2, 48),),
            (
                Kind(
                    2,
                    16,
                    128,
                    page=6144,
                    spec="SlidingWindowSpec",
                    facts={"num_kv_heads": 2, "head_size": 32, "sliding_window": 64, "page_size_padded": 6144},
                ),
            ),
        ),
        ("LBHNC", "LBNHC"),
        (16, 16),
    ),
    # Rows stand for 4 and for 128 tokens, a window's for one; pages are filled up to multiples of 576 bytes.
    Row(
        "DeepSeek V4: two compressions, an indexer, and windows",
        "models/deepseek_v4/attention.py, models/deepseek_v4/compressor.py",
        (
            (
                latent(584, 64, "uint8", page=37440, state_content_bytes=584, tokens_per_state=4, alignment=576),
                latent(132, 64, "uint8", page=8640, tokens_per_state=4, alignment=576),
                latent(584, 2, "uint8", 1, 1728, state_content_bytes=584, tokens_per_state=128, alignment=576),
            ),
            (
                Kind(
                    1,
                    64,
                    584,
                    "uint8",
                    page=37440,
                    spec="SlidingWindowMLASpec",
                    facts={
                        "num_kv_heads": 1,
                        "head_size": 512,
                        "sliding_window": 128,
                        "state_content_bytes": 584,
                        "alignment": 576,
                    },
                ),
            ),
        ),
        ("BLHNC", "BLNHC"),
        (256, 64),
        cache_dtype="fp8_ds_mla",
    ),
    # One token has four rows.
    Row(
        "Voxtral's pooled blocks",
        f"{_INTERFACE} (AttentionSpec.tokens_per_state)",
        ((full(rows=64, tokens_per_state=Fraction(1, 4)),),),
        COMPACT,
        packed=True,
    ),
]


def spec_of(kind: Kind, tokens: int) -> Any:
    """A stand-in for the specification of these layers."""
    facts = dict(kind.facts)
    if "kv_quant_mode" in facts or kind.spec != "MLAAttentionSpec":
        facts["kv_quant_mode"] = SimpleNamespace(name=facts.get("kv_quant_mode", "NONE"))
    return type(kind.spec, (SimpleNamespace,), {})(block_size=tokens, dtype=kind.dtype, **facts)


def names_of(row: Row) -> list[list[list[str]]]:
    """Names of the layers, by group and kind."""
    return [
        [[f"g{group}.k{at}.{layer}" for layer in range(kind.layers)] for at, kind in enumerate(kinds)]
        for group, kinds in enumerate(row.groups)
    ]


def config_of(row: Row) -> SimpleNamespace:
    """What vLLM says of the groups: one specification, or one for each layer."""
    groups = []
    for kinds, names, tokens in zip(row.groups, names_of(row), row.tokens, strict=True):
        by_layer = {name: spec_of(kind, tokens) for kind, these in zip(kinds, names, strict=True) for name in these}
        spec: Any = next(iter(by_layer.values()))
        if len(kinds) > 1:
            spec = type("UniformTypeKVCacheSpecs", (SimpleNamespace,), {})(block_size=tokens, kv_cache_specs=by_layer)
        groups.append(SimpleNamespace(layer_names=list(by_layer), kv_cache_spec=spec))
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups)


def places_of(row: Row, layout: str) -> tuple[int, dict[str, tuple[Kind, int, tuple[int, ...], tuple[int, ...]]]]:
    """Where the layers lie: bytes in all, and for each its kind, offset, shape and strides, all in bytes."""
    outermost = layout.startswith("B")
    whole = max(sum(kind.stride * kind.layers for kind in kinds) for kinds in row.groups)
    places = {}
    for kinds, names in zip(row.groups, names_of(row), strict=True):
        offset = 0
        for kind, these in zip(kinds, names, strict=True):
            rows = kind.rows // row.ratio
            extents = {"L": kind.layers, "B": BLOCKS * row.ratio, "H": kind.heads, "N": rows, "C": kind.content}
            strides, step = {}, 1
            for axis in reversed(layout):
                if axis in layout[:2] and set(layout[:2]) == {"L", "B"}:
                    step = max(step, kind.stride // row.ratio)
                strides[axis] = step
                step *= extents[axis]
            if outermost:
                strides["B"] = whole
            for layer, name in enumerate(these):
                shape = tuple(extents[axis] for axis in "BHNC")
                at = offset + layer * strides["L"]
                places[name] = kind, at, shape, tuple(strides[axis] for axis in "BHNC")
            offset += kind.layers * (kind.stride if outermost else strides["L"])
    return whole * BLOCKS, places


def allocate(row: Row, layout: str) -> tuple[Any, dict[str, Tensor]]:
    """The memory and the layers' tensors, as vLLM cuts them from it."""
    size, places = places_of(row, layout)
    memory = np.zeros(size, np.uint8)
    tensors = {}
    for name, (kind, offset, shape, strides) in places.items():
        item = _BYTES[kind.dtype]
        tensor = np.ndarray((*shape[:3], shape[3] // item), f"u{item}", memory, offset, (*strides[:3], item))
        tensors[name] = tensor.view(Tensor)
    return memory, tensors
