"""Real torch tensors in host memory are found, and pools become tensors."""

from __future__ import annotations

import pytest
import torch

import pdkv
from pdkv.memory import describe


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.int8, torch.bool])
def test_a_tensor_on_the_cpu(dtype):
    tensor = torch.zeros((4, 6, 8), dtype=dtype)[1:, ::2]
    facts = describe(tensor)
    assert (facts.address, facts.shape, facts.itemsize) == (tensor.data_ptr(), (3, 3, 8), dtype.itemsize)
    assert facts.strides == tuple(step * dtype.itemsize for step in tensor.stride())
    assert facts.dtype == str(dtype).removeprefix("torch.")
    assert (facts.device, facts.stream, facts.pinned, facts.readonly) == ("cpu", None, False, False)


def test_a_tensor_of_nothing_is_refused():
    with pytest.raises(pdkv.UnsupportedError, match="meta"):
        describe(torch.zeros(4, device="meta"))
    with pytest.raises(pdkv.LayoutError, match="sparse"):
        describe(torch.zeros(4).to_sparse())


@pytest.mark.parametrize("make", [torch.from_dlpack, lambda pool: torch.frombuffer(pool, dtype=torch.uint8)])
def test_a_pool_becomes_a_tensor(make):
    pool = pdkv.Engine.allocate(4096)
    tensor = make(pool)
    assert (tensor.data_ptr(), tensor.shape, tensor.dtype) == (pool.address, (4096,), torch.uint8)
    tensor[:] = 7
    assert memoryview(pool)[4095] == 7
    del pool
    tensor[:] = 8
    assert int(tensor.sum()) == 8 * 4096


def test_a_device_is_named_as_torch_does():
    assert pdkv.Engine.allocate(64, device=torch.device("cpu")).device is None
