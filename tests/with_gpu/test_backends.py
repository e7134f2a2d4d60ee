"""Caches of every attention backend of vLLM on a GPU: `PdkvConnector` registers them, and blocks go over byte for byte.

What each backend lays out says the table of `connectors.backends`. vLLM is its stand-in; what is torch's here is a
mirror of the GPU's memory, whose tensors are cut and strided by numpy and never moved themselves.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from connectors.backends import TABLE, allocate, config_of
from connectors.exchange import expected, offer, one_order, order, pairs
from connectors.llm_requests import engine_config
from connectors.replay import CHANGES, replay
from connectors.sides import until
from connectors.stand_in import Tensor, vllm
from pdkv.connectors.core.work import Work
from with_gpu.tensors import Driver, on_gpu

RELEASE = CHANGES[-1]
ROWS = {row.backend: row for row in TABLE}
SLOW_COPIES = 16


class Device:
    type, index = "cuda", 0

    def __str__(self):
        return "cuda:0"


class OnGpu(Tensor):
    """A torch tensor of the GPU's memory: where it lies in the mirror, its bytes lie on the GPU."""

    layout, device, is_cpu = "torch.strided", Device(), False

    def __array_finalize__(self, other):
        self.pool, self.mirror = getattr(other, "pool", None), getattr(other, "mirror", 0)

    def data_ptr(self):
        return self.pool.address + super().data_ptr() - self.mirror

    def untyped_storage(self):
        return self.pool

    @staticmethod
    def over(tensor, pool, memory):
        """A tensor of the mirror's, as one of the GPU's."""
        made = tensor.view(OnGpu)
        made.pool, made.mirror = pool, memory.ctypes.data
        return made


class Event:
    """`torch.cuda.Event`, of the driver's."""

    def __init__(self):
        self._driver, self._event = Driver(), ctypes.c_void_p()
        self._driver.inside("cuEventCreate", ctypes.byref(self._event), 2)

    def record(self, stream):
        self._driver.inside("cuEventRecord", self._event, ctypes.c_void_p(stream.cuda_stream))

    def query(self):
        try:
            self._driver.inside("cuEventQuery", self._event)
        except RuntimeError:
            return False
        return True


@pytest.fixture(autouse=True)
def torch(monkeypatch):
    """As much of it as the connector asks for."""
    module = ModuleType("torch")

    def as_strided(tensor, size, strides):
        steps = [stride * tensor.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(tensor, size, steps, subok=True)

    module.as_strided, module.uint8, module.Tensor = as_strided, np.uint8, OnGpu
    module.version = SimpleNamespace(hip=None)

    def current_stream(device):
        return SimpleNamespace(cuda_stream=End.at_work.stream, device_index=0)

    module.cuda = SimpleNamespace(Event=Event, current_stream=current_stream, is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", module)


class End:
    """A worker of vLLM with the memory of a row on the GPU, and a stream of its own."""

    at_work = None

    def __init__(self, row, layout, role, stack, module):
        self.memory, tensors = allocate(row, layout)
        self.pool = on_gpu(self.memory.size)
        self.tensors = {name: OnGpu.over(tensor, self.pool, self.memory) for name, tensor in tensors.items()}
        self.config = config_of(row)
        config = engine_config(role, role, 1, "fail", False, False, {})
        config.cache_config.cache_dtype = row.cache_dtype
        self._module, self._step, self._driver = module, 0, Driver()
        self.stream, End.at_work = self._driver.stream(), self
        self.worker = module.PdkvConnector(config, module.KVConnectorRole.WORKER, self.config)
        stack.callback(self.worker.shutdown)
        gave = replay(RELEASE, "start_worker", self.worker, kv_caches=self.tensors, copy_operation=None)
        self.info = gave["get_handshake_metadata"].info
        self.sent, self.received, self.failed, self.paths = set(), set(), set(), {}

    def step(self, work=Work.NOTHING):
        """A step without tokens, which brings this."""
        self._step, End.at_work = self._step + 1, self
        metadata = pickle.loads(pickle.dumps(self._module.PdkvMetadata(work, self._step)))
        how = {"metadata": metadata, "forward_context": None, "finished_req_ids": set()}
        gave = replay(RELEASE, "work_without_tokens", self.worker, **how)
        results = gave["get_transfer_results"]
        self.sent |= results.finished_sending
        self.received |= results.finished_recving
        self.failed |= results.failed_recving
        if (stats := gave["get_kv_connector_stats"]) is not None:
            self.paths |= stats.data["paths"]
        return self._step

    def write(self):
        """Has the GPU take over what is in the mirror, after something slow."""
        for _ in range(SLOW_COPIES):
            self._driver.copy(self.pool.address, self.pool.address, 1, self.stream)
        self._driver.copy(self.pool.address, self.memory.ctypes.data, self.memory.size, self.stream)

    def read(self):
        """What is on the GPU, once it has done what it was asked."""
        found = np.zeros_like(self.memory)
        self._driver.copy(found.ctypes.data, self.pool.address, found.size, self.stream)
        self._driver.inside("cuStreamSynchronize", ctypes.c_void_p(self.stream))
        return found


@pytest.mark.parametrize("name", ROWS)
def test_a_block_goes_over_byte_for_byte(name):
    row = ROWS[name]
    for here, there in pairs(row):
        if row.packed and not one_order(row, here, there):
            continue  # refused before anything is moved: tests/connectors/test_backends.py
        with ExitStack() as stack:
            module = stack.enter_context(vllm(RELEASE, "cuda"))
            p = End(row, here, "kv_producer", stack, module)
            d = End(row, there, "kv_consumer", stack, module)
            p.memory[:] = np.random.default_rng(7).integers(1, 256, p.memory.size, np.uint8)
            d.memory[:] = 0xEE
            want = expected(p, d)
            written = p.step()
            p.write()
            d.write()
            groups = len(row.groups)
            producer, references, work = offer(p.info, groups, stack, step=written)
            p.step(work)
            d.step(order(groups, producer, references))
            until(lambda p=p, d=d: (p.step(), d.step(), d.received)[2])
            assert not d.failed
            wrong = np.flatnonzero(d.read() != want)
            assert not wrong.size, f"{here} to {there}: {wrong.size} wrong bytes, the first at {wrong[0]}"
            until(lambda p=p: (p.step(), p.sent)[1])
            assert set(d.paths) == {"cuda"}
