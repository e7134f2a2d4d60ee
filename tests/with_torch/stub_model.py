"""What vLLM 0.8's model runner hands to a connector: a model's facts, a batch, and a real paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

NUM_BLOCKS, BLOCK_TOKENS = 32, 16


@dataclass(frozen=True)
class Shape:
    """A model as far as its cache shows it."""

    layers: int = 3
    start_layer: int = 0
    kv_heads: int = 2
    head_dim: int = 8
    hidden: int = 32
    dtype: torch.dtype = torch.float32
    latent: int = 0  # MLA: size of the latent, beside which lies the rotary part of size `head_dim`
    scale: float = 1.0

    def executable(self):
        """The model: what of it the connector reads."""
        attention = SimpleNamespace(
            kv_cache_dtype="auto", _k_scale=torch.tensor(self.scale), _v_scale=torch.tensor(self.scale)
        )
        layer = SimpleNamespace(self_attn=SimpleNamespace(attn=attention, mla_attn=attention))
        config = SimpleNamespace(
            num_key_value_heads=self.kv_heads,
            num_attention_heads=self.hidden // self.head_dim,
            hidden_size=self.hidden,
            head_dim=self.head_dim,
            kv_lora_rank=self.latent,
            qk_rope_head_dim=self.head_dim,
        )
        end = self.start_layer + self.layers
        return SimpleNamespace(
            model=SimpleNamespace(
                start_layer=self.start_layer, end_layer=end, config=config, layers=[layer for _ in range(end)]
            )
        )

    def caches(self):
        """Empty pages, one tensor a layer, as vLLM 0.8 lays them out."""
        if self.latent:
            shape = (NUM_BLOCKS, BLOCK_TOKENS, self.latent + self.head_dim)
        else:
            shape = (2, NUM_BLOCKS, BLOCK_TOKENS, self.kv_heads, self.head_dim)
        return [torch.zeros(shape, dtype=self.dtype) for _ in range(self.layers)]

    def fill(self, caches):
        """Fills pages: values depend on layer, K or V, block and place, and are small integers, exact in any dtype."""
        for layer, cache in enumerate(caches):
            places = torch.arange(cache.numel()).view(cache.shape)
            cache.copy_((places * 31 + places // 97 + layer * 53) % 251 + 1)


@dataclass(frozen=True)
class Batch:
    """One step of a model runner: prompts, and then rows of requests that decode already."""

    prompts: tuple[tuple[int, ...], ...]
    decoding: tuple[int, ...] = ()  # lengths so far

    def model_input(self, blocks):
        """The batch as vLLM 0.8 describes it, with pages taken from an iterator of free blocks."""
        lengths = [len(prompt) for prompt in self.prompts]
        slots, tokens = [], []
        for prompt in self.prompts:
            table = torch.tensor([next(blocks) for _ in range(0, len(prompt), BLOCK_TOKENS)])
            place = torch.arange(len(prompt))
            slots.append(table[place // BLOCK_TOKENS] * BLOCK_TOKENS + place % BLOCK_TOKENS)
            tokens.append(torch.tensor(prompt))
        for length in self.decoding:  # one token and one slot each
            slots.append(torch.tensor([next(blocks) * BLOCK_TOKENS + length % BLOCK_TOKENS]))
            tokens.append(torch.tensor([length]))
        return SimpleNamespace(
            input_tokens=torch.cat(tokens),
            attn_metadata=SimpleNamespace(
                seq_lens=[*lengths, *self.decoding],
                num_prefill_tokens=sum(lengths),
                slot_mapping=torch.cat(slots),
            ),
        )


def steps(batches, seed):
    """The batches one after the other, with pages wherever an allocator of that seed found some."""
    free = iter(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist())
    return [batch.model_input(free) for batch in batches]


def hidden_states(shape, model_input):
    """Hidden states that depend on the token and on where it stands in the batch."""
    tokens = model_input.input_tokens[:, None]
    return ((tokens * 7 + torch.arange(len(tokens))[:, None] + torch.arange(shape.hidden)) % 127).to(shape.dtype)
