"""torch for the CPU, made to have one GPU: the stand-in for the driver, whose memory the CPU may touch.

A tensor on it lies in memory of the stand-in (gpu_memory.py), and says that its device is `cuda:0`. What torch refuses
it refuses too: a tensor of the host beside one of the GPU, and reading one of the GPU as an array. Streams are the
stand-in's. A graph that is captured is a list of what was asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

from gpu_memory import GRAIN, Allocator, Driver

_STEPS = 64  # of the stand-in's stream: what keeps one busy for a while

torch = None
_state = threading.local()


class _Stream:
    """A stream of torch's."""

    device_index = 0

    def __init__(self, handle=None):
        self.cuda_stream = _driver.stream() if handle is None else handle

    def synchronize(self):
        _driver.inside("cuStreamSynchronize", ctypes.c_void_p(self.cuda_stream))


class _Event:
    def __init__(self, enable_timing=False):
        self._at = 0.0

    def record(self, stream=None):
        self._at = time.perf_counter()

    def synchronize(self):
        _synchronize()

    def elapsed_time(self, later):
        return (later._at - self._at) * 1e3


class _Graph:
    """What was asked of the GPU while it was captured."""

    def __init__(self):
        self.asked = []

    def replay(self):
        for ask in self.asked:
            ask()


@contextlib.contextmanager
def _use(stream):
    before, _state.stream = _current(), stream
    try:
        yield
    finally:
        _state.stream = before


@contextlib.contextmanager
def _capture(graph):
    stream = _Stream()
    _driver.capture(stream.cuda_stream, on=True)
    _state.graph = graph
    try:
        with _use(stream):
            yield
    finally:
        _state.graph = None
        _driver.capture(stream.cuda_stream, on=False)


def _current(device=None):
    return getattr(_state, "stream", None) or _DEFAULT


def _synchronize(device=None):
    if getattr(_state, "graph", None) is not None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    _driver.inside("cuCtxSynchronize")


def _sleep(cycles):
    stream = _current().cuda_stream
    for _ in range(_STEPS):
        _driver.copy(_WORD, _WORD, 1, stream)


def _on_gpu(device):
    return device is not None and str(device).startswith("cuda")


def _plain(tensor):
    return torch.Tensor.as_subclass(tensor, torch.Tensor)


def _place(address_or_array, nbytes):
    array = address_or_array
    if isinstance(array, int):
        array = (ctypes.c_ubyte * nbytes).from_address(array)
    return torch.frombuffer(array, dtype=torch.uint8, count=nbytes)


def _move(tensor):
    """The same content on the GPU."""
    tensor = _plain(tensor).contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    moved = _place(_allocator.take(nbytes), nbytes).view(tensor.dtype).view(tensor.shape)
    moved.copy_(tensor)
    return moved.as_subclass(_OnGpu)


def _define():
    class OnGpu(torch.Tensor):
        """A tensor of the GPU."""

        is_cuda, is_cpu = True, False

        @property
        def device(self):
            return torch.device("cuda", 0)

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            every = [*args, *(kwargs or {}).values()]
            every += [inner for one in every if isinstance(one, tuple | list) for inner in one]
            mixed = any(type(one) is torch.Tensor and one.dim() > 0 for one in every)
            if mixed and func is not torch.Tensor.copy_:
                raise RuntimeError(f"Expected all tensors to be on the same device ({func.__name__})")
            return super().__torch_function__(func, types, args, kwargs or {})

        def numpy(self):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

        def __array__(self, *_):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

        def cpu(self):
            _synchronize()
            return _plain(self).clone()

        def to(self, *args, **options):
            return self if _on_gpu(args[0]) else _plain(self).to(*args, **options)

        def clone(self):
            return _move(self)

        def is_pinned(self, device=None):
            return False

        def copy_(self, other):
            if _current() is _DEFAULT:
                return super().copy_(other)
            nbytes = self.numel() * self.element_size()
            _driver.copy(self.data_ptr(), other.data_ptr(), nbytes, _current().cuda_stream)
            return self

        def add_(self, number):
            graph = getattr(_state, "graph", None)
            if graph is None:
                return super().add_(number)
            graph.asked.append(lambda: torch.Tensor.add_(self, number))
            return self

        @property
        def __cuda_array_interface__(self):
            if self.dtype != torch.uint8:
                raise AttributeError("__cuda_array_interface__")
            strides = None if self.is_contiguous() else self.stride()
            return {
                "typestr": "|u1",
                "shape": tuple(self.shape),
                "strides": strides,
                "data": (self.data_ptr() if self.numel() else 0, False),
                "version": 2,
            }

        def __dlpack_device__(self):
            return 2, 0

        def __dlpack__(self, *, stream=-1, max_version=None, dl_device=None, copy=None):
            if stream is not None and type(stream) is not int:
                raise TypeError("stream must be int or none")
            if stream == 0:
                raise AssertionError("unsupported stream on CUDA: 0")
            if stream != -1:
                _driver.after(1 if stream is None else stream, _current().cuda_stream)
            return torch.Tensor.__dlpack__(_plain(self), max_version=max_version)

    return OnGpu


def _zeros(real):
    def zeros(*size, device=None, pin_memory=False, **options):
        if pin_memory:
            nbytes = real(*size, **options).nbytes
            made = _place(_driver.pinned(nbytes), nbytes)
            _pinned.add(made.data_ptr())
            return made.zero_()
        made = real(*size, **options)
        return _move(made) if _on_gpu(device) else made

    return zeros


def _empty(real):
    def empty(*size, pin_memory=False, **options):
        return torch.zeros(*size, pin_memory=True, **options) if pin_memory else real(*size, **options)

    return empty


def _as_tensor(real):
    def as_tensor(data, dtype=None, device=None):
        interface = getattr(data, "__cuda_array_interface__", None)
        if interface is not None and not isinstance(data, torch.Tensor):
            address, readonly = interface["data"]
            if readonly or interface["typestr"] != "|u1" or interface.get("strides"):
                raise TypeError("not what this torch reads")
            return _lent(address, interface["shape"][0], data)
        made = real(data, dtype=dtype)
        return _move(made) if _on_gpu(device) else made

    return as_tensor


def _lent(address, nbytes, owner):
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    array.owner = owner
    return _place(array, nbytes).as_subclass(_OnGpu)


def _from_dlpack(owner, *, device=None, copy=None):
    from pdkv._core import dlpack_facts

    kind, index = owner.__dlpack_device__()
    options = {"stream": 1} if kind == 2 else {}
    capsule = owner.__dlpack__(max_version=(1, 0), **options)
    address, shape, _strides, _itemsize, _dtype, _readonly = dlpack_facts(capsule)
    assert (int(kind), int(index)) == (2, 0)
    return _lent(address, shape[0], (owner, capsule))


def patch(module):
    """Gives torch a GPU."""
    global torch, _driver, _allocator, _OnGpu, _DEFAULT, _WORD, _pinned
    torch, _driver, _pinned = module, Driver(), set()
    _allocator = Allocator(_driver)
    _WORD = _driver.allocate(GRAIN)
    _DEFAULT = _Stream(0)
    _OnGpu = _define()
    to, is_pinned = torch.Tensor.to, torch.Tensor.is_pinned
    torch.Tensor.to = lambda tensor, *args, **options: (
        _move(tensor) if args and _on_gpu(args[0]) else to(tensor, *args, **options)
    )
    torch.Tensor.is_pinned = lambda tensor, device=None: tensor.data_ptr() in _pinned or is_pinned(tensor)
    torch.empty, torch.zeros = _empty(torch.empty), _zeros(torch.zeros)
    torch.as_tensor, torch.from_dlpack = _as_tensor(torch.as_tensor), _from_dlpack
    cuda = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.init, cuda.device_count = lambda: None, lambda: 1
    cuda.synchronize, cuda.current_stream, cuda.default_stream = _synchronize, _current, lambda device=None: _DEFAULT
    cuda.Stream, cuda.Event, cuda.stream, cuda._sleep = _Stream, _Event, _use, _sleep
    cuda.CUDAGraph, cuda.graph = _Graph, _capture
