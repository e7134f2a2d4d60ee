"""Lookup buffers with torch's tensors, and `SimpleBuffer` with vLLM 0.8.5's own class at the other end."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import pdkv
from lookup.fake_pipe import fake_pair
from pdkv._core import LookupIndex
from pdkv.lookup_buffer import KVStore, LookupBuffer, SimpleBuffer
from pdkv.testing import connected_pair
from with_torch import vllm_classes

pytestmark = pytest.mark.torch


def entry(*tokens, dtype=torch.bfloat16):
    """Five tensors as vLLM's connector makes them."""
    first = float(tokens[0])
    return (
        torch.tensor(tokens),
        torch.ones(len(tokens), dtype=torch.bool),
        torch.full((2, len(tokens), 3), first, dtype=dtype),
        torch.full((2, len(tokens), 3), -first, dtype=dtype),
        torch.full((len(tokens), 4), first / 2, dtype=dtype),
    )


def equal(found, given):
    return all(
        one is None if other is None else one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(found, given, strict=True)
    )


def test_the_index_reads_tensors_as_they_are():
    index = LookupIndex()
    number = index.insert(torch.arange(10)[::3])
    assert index.find(np.array([0, 3, 6, 9, 12])) == (number, 4)
    for tokens in (torch.arange(3, dtype=torch.int32), torch.ones(3), torch.zeros(2, 2, dtype=torch.int64)):
        with pytest.raises(pdkv.LayoutError):
            index.insert(tokens)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("mask", [torch.bool, torch.bfloat16, torch.float32, torch.int64])
def test_tokens_and_masks_of_every_dtype(dtype, mask):
    with LookupBuffer() as buffer:
        given = (torch.tensor([7, 1, 2], dtype=dtype), torch.tensor([0, 1, 1]).to(mask), *entry(1)[2:])
        buffer.insert(*given)
        assert buffer.used_bytes == sum(tensor.numel() * tensor.element_size() for tensor in given)
        assert buffer.peek(torch.tensor([1, 2, 3]), torch.tensor([True, True, False])) == 2
        assert buffer.peek(np.array([1, 2])) == 2
        found = buffer.drop_select(torch.tensor([9, 1]), torch.tensor([0.0, 1.0]), timeout_s=60)
        assert all(one is other for one, other in zip(found, given, strict=True))


def test_floats_are_no_tokens_and_objects_no_tensors():
    with LookupBuffer() as buffer:
        for tensors in ((torch.ones(3), None, None, None, None), (torch.tensor([1]), None, "key", None, None)):
            with pytest.raises(pdkv.LayoutError):
                buffer.insert(*tensors)
    with KVStore() as store:
        store.put("a", torch.ones(3, dtype=torch.bfloat16))
        assert store.used_bytes == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("large", [False, True])
def test_tensors_of_every_kind_travel(dtype, large):
    shape = (2, 700, 33) if large else (2, 3)
    given = (
        torch.arange(5),
        torch.tensor([1, 1, 1, 1, 0]) > 0,
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype).transpose(0, 1),
        torch.tensor(2.5, dtype=dtype),
    )
    with (
        connected_pair() as pair,
        LookupBuffer(pair.producer) as producer,
        LookupBuffer(pair.consumer, pair.to_producer) as consumer,
        KVStore(pair.producer) as store,
        KVStore(pair.consumer, [pair.to_producer]) as client,
    ):
        producer.insert(*given)
        found = consumer.drop_select(torch.arange(4), None, timeout_s=60)
        store.put("a", given[2])
        for one, other in zip([*found, client.get("a", 20)], [*given, given[2]], strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.fixture
def pipes():
    made = fake_pair(), fake_pair()
    yield made
    for ends in made:
        ends[0].abort()


def theirs():
    vllm_classes.load()
    from vllm.distributed.kv_transfer.kv_lookup_buffer.simple_buffer import SimpleBuffer as Theirs

    return Theirs


@pytest.mark.vllm
def test_our_producer_serves_their_consumer(pipes):
    (signal, other_signal), (data, other_data) = pipes
    producer, consumer = SimpleBuffer(signal, data, 1e6), theirs()(other_signal, other_data, 1e6)
    given = [entry(1, 2, 3), entry(4, 5), entry(6)]
    for one in given:
        producer.insert(*one)
    assert equal(consumer.drop_select(torch.tensor([4, 5, 6]), torch.ones(3, dtype=torch.bool)), given[1])
    assert equal(consumer.drop_select(torch.tensor([6]), torch.ones(1, dtype=torch.bool)), given[2])
    assert equal(consumer.drop_select(torch.tensor([1]), torch.ones(1, dtype=torch.bool)), given[0])
    consumer.close()
    producer.close(timeout_s=60)
    assert producer._room.used == 0


@pytest.mark.vllm
def test_their_producer_serves_our_consumer(pipes):
    (signal, other_signal), (data, other_data) = pipes
    producer, consumer = theirs()(signal, data, 1e6), SimpleBuffer(other_signal, other_data, 1e6)
    given = [entry(1, 2, 3), entry(4, 5), entry(6)]
    for one in given:
        producer.insert(*one)
    # Without a mask, and without tokens: what would end their producer if it came as it was asked.
    assert equal(consumer.drop_select(torch.tensor([4, 5, 6]), None), given[1])
    assert equal(consumer.drop_select(None, None), given[2])
    assert equal(consumer.drop_select(torch.tensor([1]), torch.tensor([True])), given[0])
    consumer.close()
    producer.close()


@pytest.mark.vllm
@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_theirs(seed):
    """The same inserts and selects on their buffer and on ours."""
    random = np.random.default_rng(seed)
    buffers = []
    for maker in (theirs(), SimpleBuffer):
        (signal, other_signal), (data, other_data) = fake_pair(), fake_pair()
        buffers.append((maker(signal, data, 1e6), maker(other_signal, other_data, 1e6)))
    ours = buffers[1][0]
    for step in range(80):
        tokens = torch.tensor([int(token) for token in random.integers(0, 2, random.integers(1, 4))])
        mask = torch.ones(len(tokens)) > 0
        # A miss would wait for an insert: it is asked for only what is there.
        if random.random() < 0.5 or ours._shelf.peek(tokens.numpy(), longest=False) is None:
            for producer, _ in buffers:
                producer.insert(tokens, mask, torch.tensor([step]), torch.zeros(1), torch.zeros(1))
            continue
        found = [consumer.drop_select(tokens, mask) for _, consumer in buffers]
        assert int(found[0][2]) == int(found[1][2])
    for producer, consumer in buffers:
        consumer.close()
        producer.close()


def test_many_threads_select_over_one_pair_of_pipes(pipes):
    (signal, other_signal), (data, other_data) = pipes
    producer, consumer = SimpleBuffer(signal, data, 1e6), SimpleBuffer(other_signal, other_data, 1e6)
    found = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(consumer.drop_select(torch.tensor([n]), None)), daemon=True)
        for n in range(8)
    ]
    producer.insert(*entry(99))
    for thread in threads:
        thread.start()
    for number in range(8):
        producer.insert(*entry(number, number))
    for thread in threads:
        thread.join(120)
    assert sorted(int(one[0][0]) for one in found) == list(range(8))
    consumer.close()
    producer.close(timeout_s=60)
