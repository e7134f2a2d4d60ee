"""Geometries of published models: what one token leaves in the KV cache.

Numbers are those of the `config.json` that each model's publisher ships; `source` says where. The
presets describe the whole model on one rank: tensor and pipeline parallel shards are smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ConfigError

ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """How many bytes a token needs and how they are grouped.

    Attributes:
        name: The preset, `custom`, or `raw` for plain blocks.
        layers: Layers that keep a cache.
        kv_heads: Heads per layer; 1 for MLA.
        content: Elements per (head, token): K and V side by side, or the latent of MLA.
        dtype: Element type; one of `ITEM_BYTES`.
        source: Where the numbers come from.
    """

    name: str
    layers: int
    kv_heads: int
    content: int
    dtype: str
    source: str = ""

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    def page_bytes(self, block_tokens: int) -> int:
        """Bytes of one block in one layer."""
        return self.kv_heads * block_tokens * self.content * self.item_bytes

    def token_bytes(self) -> int:
        """Bytes one token needs in all layers."""
        return self.layers * self.page_bytes(1)


def _attention(name: str, layers: int, kv_heads: int, head_dim: int, source: str, dtype: str = "bfloat16") -> Geometry:
    return Geometry(name, layers, kv_heads, 2 * head_dim, dtype, source)


_HUB = "https://huggingface.co/{}/blob/main/config.json"

PRESETS: dict[str, Geometry] = {
    geometry.name: geometry
    for geometry in (
        # Not published: small enough for a test, shaped like the rest.
        _attention("tiny", 4, 2, 32, "made up for tests"),
        _attention("llama-3.1-8b", 32, 8, 128, _HUB.format("meta-llama/Llama-3.1-8B")),
        _attention("llama-3.3-70b", 80, 8, 128, _HUB.format("meta-llama/Llama-3.3-70B-Instruct")),
        _attention("qwen3-32b", 64, 8, 128, _HUB.format("Qwen/Qwen3-32B")),
        # kv_lora_rank 512 + qk_rope_head_dim 64: one latent per token, shared by all heads.
        Geometry("deepseek-v3", 61, 1, 576, "bfloat16", _HUB.format("deepseek-ai/DeepSeek-V3")),
        # Every second layer keeps a window of 128 tokens only; here all keep everything, the larger case.
        _attention("gpt-oss-120b", 36, 8, 64, _HUB.format("openai/gpt-oss-120b")),
    )
}


def preset(name: str) -> Geometry:
    """Looks a geometry up by name.

    Raises:
        ConfigError: There is no such preset.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(
            f"no model preset is named `{name}`", hint=f"use one of {', '.join(sorted(PRESETS))}, or `custom`"
        ) from None


def custom(layers: int, kv_heads: int, head_dim: int, dtype: str) -> Geometry:
    """Makes the geometry of `--model custom`: K and V of `head_dim` elements each.

    Raises:
        ConfigError: A number is not positive or the dtype is unknown.
    """
    for what, value in (("--layers", layers), ("--kv-heads", kv_heads), ("--head-dim", head_dim)):
        if value < 1:
            raise ConfigError(f"`{what}` is `{value}`, it must be at least 1")
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"`--dtype {dtype}` is unknown", hint=f"use one of {', '.join(ITEM_BYTES)}")
    return _attention("custom", layers, kv_heads, head_dim, "command line", dtype)


def raw(block_bytes: int) -> Geometry:
    """Makes the geometry of raw blocks: one layer whose blocks are `block_bytes` plain bytes."""
    return Geometry("raw", 1, 1, block_bytes, "uint8", "command line")
