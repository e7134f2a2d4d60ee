"""Integers outside their range are errors of pdkv that name the argument; other types stay `TypeError`."""

from __future__ import annotations

import numpy as np
import pytest

import pdkv
from pdkv import _core

TOO_SMALL, TOO_LARGE, FAR_OUT = -1, 1 << 64, 1 << 200


@pytest.fixture(scope="module")
def engine():
    with pdkv.Engine("numbers", listen=None, transports=["tcp"]) as engine:
        yield engine


@pytest.fixture(scope="module")
def cache(engine):
    tensor = np.zeros((2, 8, 1, 16, 8), np.float16)
    return engine.register_kv_cache(tensor, layout="LBHNC", block_tokens=16, model="numbers")


@pytest.fixture(scope="module")
def region(engine):
    return engine.register(bytearray(64))


SHARD = ("num_layers", "num_heads", "first_layer", "total_layers", "first_head", "total_heads")
RANKS = ("tp_rank", "tp_size", "pp_rank", "pp_size")
# (argument, kind of error, the call with that argument)
CALLS = [
    ("threads", pdkv.ConfigError, lambda e, c, r, n: pdkv.Engine("bad", threads=n)),
    ("tcp_streams", pdkv.ConfigError, lambda e, c, r, n: pdkv.Engine("bad", tcp_streams=n)),
    ("staging_bytes", pdkv.ConfigError, lambda e, c, r, n: pdkv.Engine("bad", staging_bytes=n)),
    ("nbytes", pdkv.ConfigError, lambda e, c, r, n: e.allocate(n)),
    ("max_item_bytes", pdkv.ConfigError, lambda e, c, r, n: e.accept_pipe(b"", max_item_bytes=n, timeout_s=0)),
    ("block_tokens", pdkv.LayoutError, lambda e, c, r, n: e.register_kv_cache([], block_tokens=n)),
    ("block_tokens", pdkv.LayoutError, lambda e, c, r, n: pdkv.resolve_layout([], layout="BC", block_tokens=n)),
    ("num_tokens", pdkv.LayoutError, lambda e, c, r, n: c.export([1], num_tokens=n)),
    ("num_tokens", pdkv.LayoutError, lambda e, c, r, n: c.offer([1], num_tokens=n)),
    ("consumers", pdkv.ConfigError, lambda e, c, r, n: c.export([1], consumers=n)),
    ("num_blocks", pdkv.LayoutError, lambda e, c, r, n: c.issuer().issue(num_blocks=n, num_tokens=1)),
    ("num_tokens", pdkv.LayoutError, lambda e, c, r, n: c.issuer().issue(num_blocks=1, num_tokens=n)),
    ("consumers", pdkv.ConfigError, lambda e, c, r, n: c.issuer().issue(num_blocks=1, num_tokens=1, consumers=n)),
    ("first_block", pdkv.LayoutError, lambda e, c, r, n: c.pull("", [1], first_block=n)),
    ("first_block", pdkv.LayoutError, lambda e, c, r, n: c.push("", [1], first_block=n)),
    ("layers", pdkv.LayoutError, lambda e, c, r, n: c.pull("", [1], layers=(n, 1))),
    ("layers", pdkv.LayoutError, lambda e, c, r, n: c.push("", [1], layers=(0, n))),
    ("layers", pdkv.LayoutError, lambda e, c, r, n: pdkv.plan(c.layout, [1], c.layout, [2], layers=(0, n))),
    ("offset", pdkv.RegionError, lambda e, c, r, n: r.span(n, 8)),
    ("nbytes", pdkv.RegionError, lambda e, c, r, n: r.span(0, n)),
    ("offset", pdkv.RegionError, lambda e, c, r, n: r.describe().span(n, 8)),
    ("nbytes", pdkv.RegionError, lambda e, c, r, n: r.describe().span(0, n)),
    ("seed", pdkv.ConfigError, lambda e, c, r, n: _simulate(seed=n)),
    ("engines", pdkv.ConfigError, lambda e, c, r, n: _simulate(engines=n)),
    ("exports", pdkv.ConfigError, lambda e, c, r, n: _simulate(exports=n)),
    ("blocks", pdkv.ConfigError, lambda e, c, r, n: _simulate(blocks=n)),
    ("layers", pdkv.ConfigError, lambda e, c, r, n: _simulate(layers=n)),
    *((name, pdkv.LayoutError, lambda e, c, r, n, name=name: _shard(**{name: n})) for name in SHARD + RANKS),
]


def _shard(**changes):
    return pdkv.Shard(**{"num_layers": 2, "num_heads": 2, **changes})


def _simulate(**changes):
    world = {"seed": 1, "engines": 2, "exports": 1, "blocks": 4, "layers": 1, "span_s": 0.1, "faults": False}
    return _core.simulate(**{**world, **changes})


@pytest.mark.parametrize("number", [TOO_SMALL, TOO_LARGE, FAR_OUT, -FAR_OUT])
@pytest.mark.parametrize(("name", "error", "call"), CALLS, ids=[f"{i}-{row[0]}" for i, row in enumerate(CALLS)])
def test_out_of_range(engine, cache, region, name, error, call, number):
    with pytest.raises(error, match=f"^{name}: `{name}` is `{number}`") as caught:
        call(engine, cache, region, number)
    assert "whole number from 0 to " in caught.value.hint


@pytest.mark.parametrize(("name", "error", "call"), CALLS, ids=[f"{i}-{row[0]}" for i, row in enumerate(CALLS)])
@pytest.mark.parametrize("thing", ["7", 7.0, object()], ids=["str", "float", "object"])
def test_what_is_no_integer(engine, cache, region, name, error, call, thing):
    with pytest.raises(TypeError):
        call(engine, cache, region, thing)


def test_numpy_integers_are_integers(region):
    assert region.span(np.int64(8), np.uint8(16)) == region.span(8, 16)
    assert pdkv.Shard(np.int32(2), np.int16(3)) == pdkv.Shard(2, 3)


def test_pairs_of_spans_too(engine, region):
    with pdkv.Engine("far", transports=["tcp"]) as far:
        theirs = far.register(bytearray(64)).describe()
        peer = engine.connect(far.address)
        for pair in [(-1, 8), (0, -8), (FAR_OUT, 8)]:
            with pytest.raises(pdkv.RegionError):
                peer.read((region, [pair]), theirs)
            with pytest.raises(pdkv.RegionError):
                peer.write(theirs, (region, [pair]))


def test_memory_that_describes_itself_absurdly(engine):
    class Odd:
        def __init__(self, address, shape):
            self.__array_interface__ = {
                "version": 3, "data": (address, False), "shape": shape, "strides": None, "typestr": "|u1"
            }  # fmt: skip

    for odd in (Odd(-4096, (8,)), Odd(4096, (-8,)), Odd(FAR_OUT, (8,))):
        with pytest.raises(pdkv.RegionError, match="`Odd` says of its memory"):
            engine.register(odd)


def test_one_transport_as_a_string():
    with pytest.raises(pdkv.ConfigError, match="one string") as caught:
        pdkv.Engine("bad", transports="shm")
    assert caught.value.hint == "write `transports=['shm']`"
    with pytest.raises(pdkv.ConfigError, match="no list of names"):
        pdkv.Engine("bad", transports=[7])


def test_seconds_that_no_float_holds(engine, cache):
    for call in (
        lambda: pdkv.Engine("bad", heartbeat_s=FAR_OUT**20),
        lambda: engine.connect("127.0.0.1:1", timeout_s=FAR_OUT**20),
        lambda: cache.export([1], lease_s=FAR_OUT**20),
        lambda: cache.pull("", [1], timeout_s=FAR_OUT**20),
    ):
        with pytest.raises(pdkv.ConfigError, match="_s` is `inf`"):
            call()
    with pytest.raises(TypeError):
        engine.connect("127.0.0.1:1", timeout_s="soon")
