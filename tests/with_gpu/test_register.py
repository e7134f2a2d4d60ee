"""Tensors on a GPU become regions and caches, whichever library's they are."""

from __future__ import annotations

import ctypes
import gc
import os
import types
import weakref

import numpy as np
import pytest

import pdkv
from pdkv._core import CudaLoop
from with_gpu.tensors import LEGACY_STREAM, Cupy, Dlpack, Driver, Jax, Tensor, on_gpu, torch_on


def test_a_pool_is_registered_as_it_is(pair):
    pool = on_gpu(4096)
    region = pair[0].register(pool)
    assert (region.nbytes, region.device, region.readonly, region.tensor) == (4096, 0, False, pool)
    assert region.shared
    assert pair[0].register(bytearray(64)).device is None


def test_links_say_what_becomes_of_memory_of_gpus(pair):
    one, other = pair
    peer = one.connect(other.address)
    said = {link.transport: link.gpu for link in peer.links()}
    assert (said["cuda"], said["tcp"]) == ("refused", "staged"), "there is none yet"
    one.register(on_gpu(4096))
    said = {link.transport: link.gpu for link in peer.links()}
    assert (said["inproc"], said["cuda"], said["tcp"]) == ("refused", "direct", "staged")


def test_dlpack_is_asked_for_with_a_stream_and_kept(pair):
    tensor = Dlpack(on_gpu(4096, 1))
    region = pair[0].register(tensor)
    assert (region.nbytes, region.device) == (4096, 1)
    (asked,) = tensor.asked
    assert asked.pop("stream") > 2
    assert asked == {"max_version": (1, 1)}


def test_an_interface_that_names_no_stream_gives_way_to_dlpack(pair):
    tensor = Jax(on_gpu(4096, 1))
    assert pair[0].register(tensor).nbytes == 4096
    (asked,) = tensor.asked
    assert asked["stream"] > 2, "or what JAX has under way would run into what arrives"
    tensor.__cuda_array_interface__ |= {"version": 3, "stream": None}
    assert pair[0].register(tensor).nbytes == 4096
    assert len(tensor.asked) == 1


def test_torch_tensors_keep_their_storage(pair, monkeypatch):
    torch_on(monkeypatch)
    pool = on_gpu(4096)
    tensor = Tensor(pool, (4, 16))
    region = pair[0].register(tensor)
    assert (region.nbytes, region.device) == (128, 0)
    alive = weakref.ref(pool)
    del pool, tensor
    gc.collect()
    assert alive() is not None
    region.deregister()


def test_memory_that_the_driver_does_not_know_is_refused(pair):
    array = np.zeros(64, np.uint8)

    class Liar:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (64,),
            "typestr": "|u1",
            "data": (array.ctypes.data, False),
            "version": 3,
        }

    with pytest.raises(pdkv.RegionError, match="knows no memory") as caught:
        pair[0].register(Liar())
    assert caught.value.hint


def test_a_tensor_that_names_another_gpu_is_refused(pair, monkeypatch):
    torch_on(monkeypatch)
    tensor = Tensor(on_gpu(4096, 1), (4, 16))
    tensor.device.index = 0
    with pytest.raises(pdkv.RegionError, match="says that it lies on `cuda:0`, the CUDA driver says `cuda:1`"):
        pair[0].register(tensor)


def test_a_tensor_that_reaches_past_its_allocation_is_refused(pair):
    pool = on_gpu(4096)
    with pytest.raises(pdkv.RegionError):
        pair[0].register(Cupy(pool, (1 << 40,), "|u1"))


def test_gaps_and_emptiness_are_refused_as_of_host_memory(pair):
    pool = on_gpu(4096)
    with pytest.raises(pdkv.LayoutError, match="gaps"):
        pair[0].register(Cupy(pool, (4, 4), strides=(64, 2)))
    with pytest.raises(pdkv.LayoutError, match="empty"):
        pair[0].register(Cupy(pool, (0, 4)))


def test_a_gpus_memory_is_not_adopted(pair):
    with pytest.raises(pdkv.RegionError, match="GPU") as caught:
        pair[0].register(on_gpu(4096), adopt=True)
    assert caught.value.hint


def layers(pool, count=3, blocks=8, heads=2, tokens=4, content=8):
    """Layers one after another, as torch would have views of one allocation."""
    shape = (blocks, heads, tokens, content)
    return {f"layers.{i}": Cupy(pool, shape, offset=i * int(np.prod(shape)) * 2) for i in range(count)}


def test_a_cache_has_the_layout_of_its_strides(pair):
    pool = on_gpu(1 << 20)
    cache = pair[0].register_kv_cache(layers(pool), layout="BHNC", block_tokens=4)
    array = np.zeros((3, 8, 2, 4, 8), np.float16)
    like = {f"layers.{i}": array[i] for i in range(3)}
    host = pair[0].register_kv_cache(like, layout="BHNC", block_tokens=4)
    assert cache.layout == host.layout
    assert cache.fingerprint == host.fingerprint
    with pytest.raises(pdkv.LayoutError, match="lies as"):
        pair[0].register_kv_cache(layers(pool), layout="NHD", block_tokens=4)


def test_one_tensor_with_a_layer_axis(pair):
    pool = on_gpu(1 << 20)
    cache = pair[0].register_kv_cache(Cupy(pool, (3, 8, 2, 4, 8)), layout="LBHNC", block_tokens=4)
    assert cache.layout.num_layers == 3


@pytest.mark.parametrize("other", ["host", "gpu"])
def test_a_cache_in_two_places_is_refused(pair, other):
    one = layers(on_gpu(1 << 20, 0))
    mixed = dict(one)
    mixed["layers.1"] = np.zeros((8, 2, 4, 8), np.float16)
    if other == "gpu":
        mixed["layers.1"] = layers(on_gpu(1 << 20, 1))["layers.1"]
    with pytest.raises(pdkv.RegionError, match="one cache has tensors on") as caught:
        pair[0].register_kv_cache(mixed, layout="BHNC", block_tokens=4)
    assert "for each" in caught.value.hint


WAYS = ["cupy", "torch", "cupy cache", "dlpack", "interface that names no stream"]


@pytest.mark.parametrize("way", WAYS)
def test_registering_waits_for_what_the_owner_has_under_way(pair, monkeypatch, way):
    """A fill that is still under way when a tensor is registered must not come after the first transfer into it."""
    loop, driver = CudaLoop(), Driver()
    pool, ones = on_gpu(4096), np.full(4096, 1, np.uint8)
    stream = LEGACY_STREAM if way == WAYS[-1] else loop.stream
    for _ in range(200):
        driver.copy(pool.address, pool.address, 1, stream)
    driver.copy(pool.address, ones.ctypes.data, 4096, stream)
    if way == "torch":
        torch_on(monkeypatch, stream=stream)
        region = pair[0].register(Tensor(pool, (32, 64)))
    elif way == "cupy":
        region = pair[0].register(Cupy(pool, (4096,), "|u1", stream=stream))
    elif way == "dlpack":
        region = pair[0].register(Dlpack(pool, stream))
    elif way == "cupy cache":
        tensors = {"layers.0": Cupy(pool, (8, 256), stream=stream)}
        pair[0].register_kv_cache(tensors, layout="BC", block_tokens=16)
        region = pair[0].register(pool)
    else:
        region = pair[0].register(Cupy(pool, (4096,), "|u1", version=2))
    target = np.zeros(4096, np.uint8)
    peer = pair[1].connect(pair[0].address)
    peer.read(pair[1].register(target), region.describe()).wait()
    assert (target == 1).all()


def of_the_async_allocator(nbytes):
    call = ctypes.CDLL(os.environ["PDKV_CUDA_LIBRARY"]).standin_other
    call.restype, call.argtypes = ctypes.c_uint64, [ctypes.c_int, ctypes.c_uint64, ctypes.c_int]
    return call(0, nbytes, 0)


def of_vllms_pool(nbytes):
    """As `--enable-cumem-allocator` makes it: one that no type of handle was asked for."""
    call = ctypes.CDLL(os.environ["PDKV_CUDA_LIBRARY"]).standin_segments
    call.restype = ctypes.c_uint64
    return call(0, -(-nbytes // (2 << 20)), 1, 0)


@pytest.mark.parametrize("allocate", [of_the_async_allocator, of_vllms_pool])
def test_memory_that_no_other_process_can_have_says_so_and_moves_in_this_one(pair, arena, allocate):
    nbytes = 4096
    memory = types.SimpleNamespace(address=allocate(nbytes), device=0)
    region = pair[0].register(Cupy(memory, (nbytes,), "|u1"))
    assert not region.shared
    fresh, target = np.arange(nbytes, dtype=np.uint16).astype(np.uint8), arena.empty(nbytes)
    Driver().copy(memory.address, fresh.ctypes.data, nbytes, LEGACY_STREAM)
    Driver().inside("cuCtxSynchronize")
    peer = pair[1].connect(pair[0].address)
    peer.read(pair[1].register(target.owner), region.describe(), require="cuda").wait()
    assert arena.wrong(target, fresh) == 0


def test_regions_end_where_allocations_do():
    """Layers whose allocations touch are shared one by one; pdkv must not make one region of them."""
    from pdkv._core import cache_regions

    pools = [on_gpu(2 << 20) for _ in range(2)]
    tensors = {f"layers.{i}": Cupy(pool, (8, 64)) for i, pool in enumerate(pools)}
    found = cache_regions(tensors, layout="BC", block_tokens=16)
    assert sorted(found) == sorted((pool.address, 8 * 64 * 2) for pool in pools)
