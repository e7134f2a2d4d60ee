"""Step: a CUDA graph is captured while pdkv works in another thread: neither may spoil the other.

Captures of torch's are global: while one runs, many calls of any thread fail and end it, unless that thread has said
that it knows better. An LLM engine captures at its start, and again later.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pdkv
from gpu_check.arena import is_dry, open_arena
from gpu_check.outcome import Outcome, StepFailedError, StepSkippedError
from gpu_check.pattern import random_bytes

_NBYTES, _BLOCKS = 4 << 20, 16
_ALL = list(range(_BLOCKS))
_CAPTURE_S = 1.0


class _Worker(threading.Thread):
    """Registers, pulls and closes, on memory that is there already, until it is told to end."""

    def __init__(self, arena: Any, buffers: list[Any]) -> None:
        super().__init__(daemon=True)
        self._tensors = [arena.tensor(buffer, (_BLOCKS, _NBYTES // _BLOCKS // 2), (0, 1)) for buffer in buffers]
        self.stop, self.rounds, self.error = threading.Event(), 0, ""

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                self._once()
            except pdkv.PdkvError as error:
                self.error = f"{type(error).__name__}: {error}"
                return
            self.rounds += 1

    def _once(self) -> None:
        with pdkv.Engine("producer") as producer, pdkv.Engine("consumer") as consumer:
            source, target = (
                engine.register_kv_cache({"layers.0": tensor}, layout="BC", block_tokens=16)
                for engine, tensor in zip((producer, consumer), self._tensors, strict=True)
            )
            consumer.connect(str(producer.address))
            target.pull(source.export(_ALL).reference, _ALL, require="cuda").wait()


def _refused(cache: pdkv.KvCache, stream: Any) -> bool:
    try:
        cache.export(_ALL, stream=stream)
    except pdkv.ConfigError:
        return True
    return False


def run(_budget_s: float) -> Outcome:
    """Captures, replays and compares.

    Raises:
        StepSkippedError: There is no torch.
        StepFailedError: The capture was spoiled, or a byte is wrong.
    """
    if is_dry():
        raise StepSkippedError("torch's captures are what is tried, and numpy is in torch's place here")
    import torch

    arena = open_arena()
    buffers = [arena.empty(_NBYTES) for _ in range(2)]
    content = arena.flat(random_bytes(_NBYTES, 9))
    arena.write(buffers[0], content)
    counter, graph = torch.zeros(1024, device="cuda:0"), torch.cuda.CUDAGraph()
    worker = _Worker(arena, buffers)
    with pdkv.Engine("third") as third:
        raw = arena.tensor(buffers[0], (_BLOCKS, _NBYTES // _BLOCKS // 2), (0, 1))
        cache = third.register_kv_cache({"layers.0": raw}, layout="BC", block_tokens=16)
        torch.cuda.synchronize()
        launches, refused = 0, False
        with torch.cuda.graph(graph):
            worker.start()
            until = time.monotonic() + _CAPTURE_S
            while time.monotonic() < until and launches < 2000:
                counter.add_(1)
                launches += 1
                time.sleep(0.001)
            refused = _refused(cache, torch.cuda.current_stream())
            worker.stop.set()
            worker.join(timeout=20)
    graph.replay()
    torch.cuda.synchronize()
    if worker.error or worker.rounds == 0:
        raise StepFailedError(f"pdkv failed while another thread captured: {worker.error or 'it got nowhere'}")
    if not bool((counter == launches).all()):
        raise StepFailedError(f"the graph was spoiled: {launches} additions were captured, {counter[0]} happened")
    if wrong := arena.wrong(buffers[1], content):
        raise StepFailedError(f"{wrong} bytes are wrong after transfers during a capture")
    if not refused:
        raise StepFailedError("an export was ordered after a stream that captures")
    return Outcome(text=f"{worker.rounds} engines came, pulled and went while {launches} launches were captured")
