"""Pipes that are two queues in one process: what the real ones are compared with."""

from __future__ import annotations

import queue
from collections import defaultdict

_LANES: defaultdict[tuple[int, int], queue.SimpleQueue] = defaultdict(queue.SimpleQueue)


class QueuePipe:
    """Stands where vLLM's `PyNcclPipe` stands; the ends with the same port and ranks 0 and 1 are connected."""

    def __init__(self, local_rank, config, device=None, port_offset=0):
        port = config.kv_port + port_offset
        self._out, self._in = _LANES[port, config.kv_rank], _LANES[port, 1 - config.kv_rank]

    def send_tensor(self, tensor):
        self._out.put(None if tensor is None else tensor.clone())

    def recv_tensor(self):
        return self._in.get()

    def close(self):
        pass
