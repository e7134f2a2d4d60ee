"""What the two ends do in each scenario, whatever connector they have; and the same over vLLM's classes and queues.

`produce` and `consume` are the calls of vLLM 0.8's model runner around a forward pass, one pair per batch.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch

from with_torch.queue_pipe import QueuePipe
from with_torch.stub_model import Batch, Shape, hidden_states, steps

A = tuple(range(100, 140))
B = tuple(range(300, 317))
C = tuple(range(500, 565))
ONE = (7,)

SMALL = Shape()
PLAIN = {"kv_connector": "PyNcclConnector", "kv_parallel_size": 2}
_ports = itertools.count(step=2)


@dataclass(frozen=True)
class Scenario:
    """Batches of both ends, and what must come of them at the consumer."""

    produced: tuple[Batch, ...]
    asked: tuple[Batch, ...]
    bypass: tuple[bool, ...]
    shape: Shape = SMALL
    pause_s: float = 0.0  # before each batch of the producer but the first


SCENARIOS = {
    "one": Scenario((Batch((A,)),), (Batch((A,)),), (True,)),
    "several": Scenario((Batch((A, B, C, ONE)),), (Batch((A, B, C, ONE)),), (True,)),
    "other order": Scenario((Batch((A, B)), Batch((C,))), (Batch((C, A)), Batch((B,))), (True, True)),
    "decode rows": Scenario((Batch((A, B), (9, 40)),), (Batch((B, A), (33,)),), (False,)),
    "half a prompt": Scenario((Batch((A[:25], B)),), (Batch((A, B)),), (False,)),
    "a miss that waits": Scenario((Batch((A,)), Batch((B,))), (Batch((B,)), Batch((A,))), (True, True), pause_s=0.3),
    "second stage": Scenario((Batch((A, C)),), (Batch((A, C)),), (True,), Shape(start_layer=2)),
    "bfloat16": Scenario((Batch((A, C)),), (Batch((A, C)),), (True,), Shape(dtype=torch.bfloat16)),
    "scaled": Scenario((Batch((A,)),), (Batch((A,)),), (True,), Shape(scale=2.0)),
    "latent": Scenario((Batch((A, B)),), (Batch((B, A)),), (True,), Shape(latent=24)),
    "large": Scenario(
        (Batch((A, C)),), (Batch((A, C)),), (True,), Shape(layers=8, kv_heads=8, head_dim=128, hidden=1024)
    ),
}


def vllm_config(scenario, kv_transfer_config):
    """As much of vLLM's whole configuration as connectors read."""
    return SimpleNamespace(
        kv_transfer_config=kv_transfer_config,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(is_deepseek_mla=bool(scenario.shape.latent)),
    )


def produce(connector, scenario):
    """Runs the producer's batches."""
    executable, caches = scenario.shape.executable(), scenario.shape.caches()
    scenario.shape.fill(caches)
    for number, step in enumerate(steps(scenario.produced, seed=0)):
        time.sleep(scenario.pause_s if number else 0)
        connector.send_kv_caches_and_hidden_states(executable, step, caches, hidden_states(scenario.shape, step))


def consume(connector, scenario):
    """Runs the consumer's batches: the pages afterwards, and the hidden states and the decision of each batch."""
    executable, caches = scenario.shape.executable(), scenario.shape.caches()
    answers = []
    for step in steps(scenario.asked, seed=1):
        hidden, bypass, same = connector.recv_kv_caches_and_hidden_states(executable, step, caches)
        assert same is step
        answers.append((hidden, bypass))
    return caches, answers


def in_queues(scenario):
    """What vLLM's own classes make of a scenario in one process, with queues as pipes; the producer is a thread."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.simple_connector import SimpleConnector

    port = next(_ports)

    def connector(rank, role):
        transfer = KVTransferConfig(kv_role=role, kv_rank=rank, kv_port=port, **PLAIN)
        return SimpleConnector(0, 0, vllm_config(scenario, transfer))

    with mock.patch("vllm.distributed.kv_transfer.kv_pipe.pynccl_pipe.PyNcclPipe", QueuePipe):
        first, second = connector(0, "kv_producer"), connector(1, "kv_consumer")
    thread = threading.Thread(target=produce, args=(first, scenario))
    thread.start()
    found = consume(second, scenario)
    thread.join()
    second.consumer_buffer.close()
    first.producer_buffer.close()
    return found
