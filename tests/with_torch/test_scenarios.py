"""What vLLM's own classes make of the scenarios over plain queues: the yardstick of the tests over real pipes."""

from __future__ import annotations

import pytest
import torch

from with_torch.scenarios import SCENARIOS, in_queues
from with_torch.stub_model import hidden_states, steps

pytestmark = [pytest.mark.torch, pytest.mark.vllm, pytest.mark.usefixtures("vllm")]


def prompts(batches, seed, shape):
    """Every prompt of some batches, with its slots and the hidden states that its forward pass gives."""
    for batch, step in zip(batches, steps(batches, seed), strict=True):
        states, start = hidden_states(shape, step), 0
        for prompt in batch.prompts:
            here = slice(start, start := start + len(prompt))
            yield prompt, step.attn_metadata.slot_mapping[here], states[here]


def by_slot(cache, shape):
    """A cache as [K and V or one latent, slot, ...]."""
    return cache.view(1, -1, cache.shape[-1]) if shape.latent else cache.view(2, -1, *cache.shape[3:])


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_prompt_arrives_where_it_belongs_and_nothing_else_changes(name):
    scenario = SCENARIOS[name]
    shape, source = scenario.shape, scenario.shape.caches()
    shape.fill(source)
    caches, answers = in_queues(scenario)
    assert tuple(bypass for _, bypass in answers) == scenario.bypass
    produced, all_states = list(prompts(scenario.produced, 0, shape)), []
    for prompt, slots, _ in prompts(scenario.asked, 1, shape):
        [(own, there, states)] = [entry for entry in produced if prompt[: len(entry[0])] == entry[0]]
        all_states.append(states)
        for cache, original in zip(caches, source, strict=True):
            arrived = by_slot(cache, shape)
            assert torch.equal(arrived[:, slots[: len(own)]] * shape.scale, by_slot(original, shape)[:, there])
            arrived[:, slots[: len(own)]] = 0
    assert not any(cache.any() for cache in caches)
    if all(scenario.bypass):
        assert torch.equal(torch.cat([hidden for hidden, _ in answers]), torch.cat(all_states))
    else:
        assert [hidden is None for hidden, _ in answers] == [not bypass for bypass in scenario.bypass]
