"""The connector on a GPU that lags behind: what is handed over is written, whatever else the GPU has still to do.

Neither torch nor CUDA is here: the GPU is `connectors.gpu`, and vLLM the stand-in of each release.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.gpu import Gpu
from connectors.llm import Llm
from connectors.llm_memory import NUM_BLOCKS
from connectors.llm_requests import Request, Status
from connectors.releases import number
from connectors.replay import CHANGES, arity
from connectors.stand_in import vllm
from pdkv.connectors import vllm_device, vllm_versions
from pdkv.connectors.core.config import Settings
from pdkv.errors import ConfigError, UnsupportedError

PATIENCE_S = 60.0
PROMPT = list(range(100, 122))
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
LOOKS = 30


class World:
    """A producer whose cache is on a GPU, and a consumer in the CPU's memory, which reads at once what it gets."""

    def __init__(self, release: str, stack: ExitStack, **options: Any) -> None:
        self.gpu = Gpu()
        stack.enter_context(self.gpu.torch())
        module = stack.enter_context(vllm(release, "cuda"))
        self.p = Llm(release, module, "kv_producer", name=f"p-{id(self)}", gpu=self.gpu, **options)
        self.d = Llm(release, module, "kv_consumer", name=f"d-{id(self)}", **options)
        for llm in (self.p, self.d):
            stack.callback(llm.stop)

    def step(self) -> None:
        self.p.step()
        self.d.step()
        time.sleep(0.001)

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < deadline, (self.p.requests, self.d.requests)
            self.step()

    def hand_over(self, name: str = "r", prompt: list[int] = PROMPT) -> Request:
        """Prefills a prompt, of which nothing is written before the GPU comes to it, and gives it to the consumer."""
        asked = self.p.submit(Request(name, prompt, dict(ASK)))
        self.p.step()
        assert asked.answer is not None
        return self.d.submit(Request(name, prompt, asked.answer))

    def settle(self) -> None:
        self.gpu.work_off()
        self.until(lambda: not self.p.requests and not self.d.requests)
        for llm in (self.p, self.d):
            assert sorted(llm.free) == list(range(1, NUM_BLOCKS))


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=CHANGES)
def release(request):
    return str(request.param)


def test_a_consumer_waits_for_what_the_gpu_has_not_written(release, stack):
    world = World(release, stack, ranks=2)
    request = world.hand_over()
    for _ in range(LOOKS):
        world.step()
        assert request.status is Status.WAITING_FOR_REMOTE_KVS
    world.settle()
    assert (request.status, request.loads) == (Status.FINISHED_LENGTH_CAPPED, 1)


def test_what_the_gpu_has_written_does_not_wait_for_what_it_does_next(release, stack):
    world = World(release, stack)
    first = world.hand_over("first")
    world.gpu.work_off()
    second = world.hand_over("second", PROMPT[::-1])
    world.until(lambda: first.status is Status.FINISHED_LENGTH_CAPPED)
    assert second.status is Status.WAITING_FOR_REMOTE_KVS
    assert world.gpu.done < world.gpu.given
    world.settle()
    assert second.status is Status.FINISHED_LENGTH_CAPPED


def test_a_mark_is_put_between_steps_and_nowhere_else(release, stack):
    """None within a step, where CUDA graphs may be at work."""
    world = World(release, stack)
    world.p.step()
    before = world.gpu.marks
    for _ in range(5):
        world.p.step()
    assert world.gpu.marks == before + 5


def test_an_aborted_request_is_not_waited_for(release, stack):
    world = World(release, stack)
    request = world.hand_over()
    world.step()
    world.d.abort(request)
    for _ in range(LOOKS):
        world.step()
    world.settle()


def test_whoever_asks_is_told_the_stream_of_the_thread_that_steps(stack):
    stack.enter_context(Gpu().torch())
    device = vllm_device.device_of(tensors("cuda:0"))
    device.mark()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: device.stream.cuda_stream).result() == 7


# What vLLM says of devices


def tensors(*places):
    return {str(at): SimpleNamespace(device=place) for at, place in enumerate(places)}


def test_the_cpus_memory_is_no_device():
    assert vllm_device.device_of(tensors("cpu", "cpu")) is None
    assert vllm_device.device_of({}) is None
    assert vllm_device.device_of({"a": [1]}) is None  # refused later, by what it is


@pytest.mark.parametrize("places", [("xpu:0",), ("cuda:0", "cuda:1"), ("cpu", "cuda:0"), ("tpu",)])
def test_other_devices_are_refused_by_name(places):
    with pytest.raises(UnsupportedError) as refused:
        vllm_device.device_of(tensors(*places))
    assert all(f"`{place}`" in refused.value.message for place in places)


def test_a_gpu_of_amd_is_not_taken_for_one_of_nvidia(stack, monkeypatch):
    stack.enter_context(Gpu().torch())
    import torch

    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(UnsupportedError, match="AMD"):
        vllm_device.device_of(tensors("cuda:0"))


@pytest.mark.parametrize(
    ("given", "wanted", "device", "transports"),
    [
        ({}, None, "cuda", None),
        ({}, "cuda", "cuda", None),
        ({}, "cuda", "cpu", None),  # what older releases say on any machine
        ({}, "cpu", "cpu", None),
        ({}, "cpu", "cuda", ("tcp",)),
        ({"transports": ["shm", "tcp"]}, "cpu", "cuda", ("shm", "tcp")),
    ],
)
def test_kv_buffer_device_decides_whether_bytes_go_through_the_cpus_memory(given, wanted, device, transports):
    assert vllm_device.with_buffer_device(Settings.of(given), wanted, device).transports == transports


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, "xpu"), ({"transports": ["ucx"]}, "cpu"), ({"require": "rdma"}, "cpu"), ({"require": "ucx"}, "cpu")],
)
def test_kv_buffer_device_that_contradicts_is_refused(given, wanted):
    with pytest.raises(ConfigError, match="kv_buffer_device"):
        vllm_device.with_buffer_device(Settings.of(given), wanted, "cuda")


@pytest.mark.parametrize(
    ("cumem", "device", "ours"), [(True, "cuda", True), (False, "cuda", False), (True, "cpu", False)]
)
def test_the_cache_is_allocated_where_it_can_be_shared(cumem, device, ours):
    config = SimpleNamespace(model_config=SimpleNamespace(enable_cumem_allocator=cumem))
    context = vllm_device.shareable_memory(config, device)
    assert isinstance(context, nullcontext) if ours else context is None


@pytest.mark.parametrize("cumem", [True, False])
def test_vllm_is_told_where_to_allocate_when_it_would_take_what_can_not_be_shared(release, stack, cumem):
    pools = World(release, stack, ranks=2, cumem=cumem).p.pools
    asks = "get_mem_pool_context" in arity(release, "start_worker")
    assert asks is (number(release) >= number("0.31"))
    if not (asks and cumem):
        assert pools == [None, None]
        return
    assert None not in pools, "vLLM's own allocator would be taken"
    for pool in pools:
        with pool:
            """As vLLM enters it around the allocation."""


# Blocks that vLLM clears


@pytest.mark.parametrize(("clears", "late"), [(True, {"0.32.0": False, "0.33.0": False}), (False, {})])
def test_a_load_begins_behind_the_clearing_of_its_blocks(release, stack, clears, late):
    """Until 0.32 vLLM clears new blocks of some models at the beginning of the step, those of a load too."""
    stack.enter_context(vllm(release, "cuda"))
    caches = SimpleNamespace(needs_kv_cache_zeroing=clears)
    assert vllm_versions.clears_loaded(caches) is (clears and late.get(release, True))
