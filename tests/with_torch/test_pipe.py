"""Torch tensors through a pipe: every dtype, every shape, and what torch has beyond that."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import pdkv
from pdkv.pipe import Pipe
from pdkv.pipe.device import PinnedPool
from pdkv.pipe.tensors import describe

pytestmark = pytest.mark.torch

WAIT_S = 120.0
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4},
    key=str,
)


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[Pipe, Pipe]]:
    with pdkv.Engine("a") as a, pdkv.Engine("b") as b, Pipe(a, a.connect(b.address)) as left:
        right = Pipe(b, b.connect(a.address))
        yield left, right
        right.abort()


def through(ends, tensor):
    left, right = ends
    sender = threading.Thread(target=left.send_tensor, args=(tensor, WAIT_S))
    sender.start()
    came = right.recv_tensor(WAIT_S)
    sender.join()
    return came


def same(came, sent):
    assert came.dtype == sent.dtype
    assert came.shape == sent.shape
    # Bits, since some dtypes can't be compared and NaN is not equal to itself.
    if sent.numel():
        assert torch.equal(bits(came), bits(sent))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("size", [0, 24, 1 << 18])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(ends, dtype, size):
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size * dtype.itemsize,), dtype=torch.uint8)
    sent = raw.view(dtype)
    same(through(ends, sent), sent)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 5), (2, 3, 4, 5, 6), (1,) * 20, (80, 64, 2, 16)])
def test_shapes(ends, shape):
    sent = torch.randn(shape).to(torch.bfloat16)
    came = through(ends, sent)
    same(came, sent)
    assert came.is_contiguous()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(0, 2),
        lambda t: t.permute(3, 1, 0, 2),
        lambda t: t[:, ::3],
        lambda t: t[..., 5:9],
        lambda t: t[1, 2, 3:],
        lambda t: t[:, :1].expand(-1, 7, -1, -1),
        lambda t: t.as_strided((4, 5, 6), (1, 2, 3)),
        lambda t: t.diagonal(0, 0, 1),
        lambda t: t.unfold(2, 8, 2),
        lambda t: t.to(memory_format=torch.channels_last),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_views_are_gathered_by_their_strides(ends, view, dtype):
    base = torch.randint(0, 255, (6, 12, 40, 64)).to(dtype)
    sent = view(base)
    same(through(ends, sent), sent)


def test_a_view_is_not_cloned_first(ends):
    left, _ = ends
    base = torch.zeros(64, 2, 1 << 14)
    before = left.stats["staged_bytes"]
    sent = base[:, 1]
    same(through(ends, sent), sent)
    assert left.stats["staged_bytes"] == before


def test_gradients_conjugates_and_parameters(ends):
    parameter = torch.nn.Parameter(torch.randn(3))
    came = through(ends, parameter)
    assert torch.equal(came, parameter.detach())
    assert not came.requires_grad
    complex_ = torch.randn(5, dtype=torch.complex64)
    assert torch.equal(through(ends, complex_.conj()), complex_.conj().resolve_conj())
    negative = complex_.conj().imag
    assert negative.is_neg()
    assert torch.equal(through(ends, negative), -complex_.imag)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
    ],
)
def test_what_bytes_do_not_describe_is_refused(ends, tensor):
    with pytest.raises(pdkv.UnsupportedError) as raised:
        ends[0].send_tensor(tensor)
    assert raised.value.hint


def test_describe_copies_nothing():
    base = torch.randn(4, 6)
    described = describe(base[1:, ::2])
    assert described[:5] == ("float32", (3, 3), (6, 2), 4, base.data_ptr() + 24)


def test_pinned_buffers_are_bounded_and_used_again():
    pool = PinnedPool(1 << 20, pin=False)
    tensor = torch.randn(300, 200).t()
    copy = pool.copy_of(tensor)
    assert torch.equal(copy, tensor)
    assert copy.is_contiguous()
    address = copy.data_ptr()
    del copy
    assert pool.copy_of(tensor).data_ptr() == address
    # One that is more than all may be is lent alone; the next waits until it is back.
    alone = pool.copy_of(torch.zeros(1 << 19))
    got = threading.Event()
    waiter = threading.Thread(target=lambda: (pool.copy_of(tensor), got.set()))
    waiter.start()
    assert not got.wait(0.1)
    with pytest.raises(pdkv.TransferTimeoutError):
        pool.copy_of(tensor, lambda: 0.0)
    del alone
    assert got.wait(WAIT_S)
    waiter.join()
    # Kept buffers count, whatever sizes came by.
    for exponent in range(10, 19):
        pool.copy_of(torch.zeros(1 << exponent))
    assert pool._free_bytes <= 1 << 20
    assert pool._lent_bytes == 0


class Device(torch.Tensor):
    """A tensor that says it is on a device; the copy from there is an ordinary one."""

    is_cpu = False


def test_tensors_of_a_device_go_through_the_pool():
    with pdkv.Engine("a") as a, pdkv.Engine("b") as b:
        left = Pipe(a, a.connect(b.address), buffer_bytes=4 << 20)
        left._places._pool = PinnedPool(4 << 20, pin=False)
        right = Pipe(b, b.connect(a.address))
        tensors = [torch.full((1 << 18,), float(index)).as_subclass(Device) for index in range(12)]
        # More than the pool has, and each buffer is free again only when the other end has taken it.
        sender = threading.Thread(target=lambda: [left.send_tensor(tensor, WAIT_S) for tensor in tensors])
        sender.start()
        for index in range(12):
            assert (right.recv_tensor(WAIT_S) == index).all()
        sender.join(WAIT_S)
        sender = threading.Thread(target=left.send_message, args=(b"all of them", tensors, WAIT_S))
        sender.start()
        tag, came = right.recv_message(WAIT_S)
        assert tag == b"all of them"
        assert [float(tensor[0]) for tensor in came] == list(range(12))
        sender.join(WAIT_S)
        left.abort()
        right.abort()


def test_what_there_was_no_room_for_is_tried_again(ends, monkeypatch):
    left, right = ends
    left.send_tensor(torch.arange(3))

    def full(dtype, shape, buffer):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(right._places, "land", full)
        with pytest.raises(pdkv.DeviceError, match="out of memory"):
            right.recv_tensor(WAIT_S)
    assert torch.equal(right.recv_tensor(WAIT_S), torch.arange(3))
