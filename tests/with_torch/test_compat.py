"""Putting pdkv into vLLM 0.8.5 and taking it out again, and what its connector does when something is missing."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import pdkv
from pdkv.compat import vllm_plugin, vllm_v0
from pdkv.compat.v0_pipes import MooncakePipe
from pdkv.lookup_buffer import SimpleBuffer
from pdkv.pipe import BrokenPipeException, PdkvPipe, PipeConfig
from with_torch.ports import free_ports
from with_torch.scenarios import A, B, Scenario, consume, produce, vllm_config
from with_torch.stub_model import Batch

pytestmark = [pytest.mark.torch, pytest.mark.vllm, pytest.mark.usefixtures("vllm")]

TRANSFER = "vllm.distributed.kv_transfer"


def parts():
    """Where vLLM's connector takes its pipes and buffer from."""
    connector = import_module(f"{TRANSFER}.kv_connector.simple_connector")
    pynccl = import_module(f"{TRANSFER}.kv_pipe.pynccl_pipe")
    return [
        pynccl.PyNcclPipe,
        pynccl.BrokenPipeException,
        import_module(f"{TRANSFER}.kv_pipe.mooncake_pipe").MooncakePipe,
        import_module(f"{TRANSFER}.kv_lookup_buffer.simple_buffer").SimpleBuffer,
        connector.SimpleBuffer,
    ]


@pytest.fixture
def pair():
    """Makes two connectors that have met; `settings` go to both, and close them afterwards."""
    made = []

    def make(*roles, **extra):
        port = free_ports(2)

        def connector(rank):
            from vllm.config import KVTransferConfig
            from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

            config = KVTransferConfig(
                kv_connector="PdkvConnector",
                kv_role=roles[rank],
                kv_rank=rank,
                kv_parallel_size=2,
                kv_port=port,
                kv_buffer_size=1 << 20,
                kv_connector_extra_config={"store_timeout": 120, "drain_timeout": 0, **extra},
            )
            return KVConnectorFactory.create_connector_v0(0, 0, vllm_config(SCENARIO, config))

        with ThreadPoolExecutor() as pool:
            made.extend(pool.map(connector, range(2)))
        return made

    yield make
    for connector in made:
        connector.close()


SCENARIO = Scenario((Batch((A,)),), (Batch((A, B)),), (False,))


@pytest.fixture(autouse=True)
def engine_v0(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "0")
    vllm_v0.register()


def test_vllms_own_configuration_is_understood_as_vllm_understands_it():
    from vllm.config import KVTransferConfig

    for rank, role in enumerate(("kv_producer", "kv_consumer", "kv_both")):
        text = json.dumps({"kv_connector": "PyNcclConnector", "kv_role": role, "kv_rank": rank, "kv_parallel_size": 2})
        theirs = KVTransferConfig.from_cli(text)
        ours = PipeConfig.of(theirs)
        assert ours == PipeConfig.from_cli(text)
        facts = [*theirs.model_dump(), "is_kv_producer", "is_kv_consumer", "is_kv_transfer_instance"]
        assert {name: getattr(ours, name) for name in facts} == {name: getattr(theirs, name) for name in facts}
        for config in (ours, theirs):
            assert config.get_from_extra_config("store_timeout", 7) == 7


def test_install_and_uninstall_change_all_parts_and_put_them_back():
    theirs = parts()
    vllm_v0.uninstall()
    assert parts() == theirs
    for _ in range(2):
        vllm_v0.install()
        assert parts() == [PdkvPipe, BrokenPipeException, MooncakePipe, SimpleBuffer, SimpleBuffer]
    for _ in range(2):
        vllm_v0.uninstall()
        assert parts() == theirs


def test_uninstall_leaves_alone_what_somebody_else_put_there(monkeypatch):
    theirs = parts()
    vllm_v0.install()
    with monkeypatch.context() as other:
        other.setattr(f"{TRANSFER}.kv_pipe.pynccl_pipe.PyNcclPipe", SimpleNamespace)
        vllm_v0.uninstall()
        assert parts() == [SimpleNamespace, *theirs[1:]]
    import_module(f"{TRANSFER}.kv_pipe.pynccl_pipe").PyNcclPipe = theirs[0]


def test_vllm_finds_the_plugin_and_the_plugin_the_factory():
    found = import_module("vllm.plugins").load_plugins_by_group("vllm.general_plugins")
    assert found["pdkv"] is vllm_plugin.register
    for _ in range(2):
        found["pdkv"]()
    assert issubclass(vllm_v0.PdkvConnector, import_module(f"{TRANSFER}.kv_connector.base").KVConnectorBase)
    assert vllm_v0.PdkvConnector is vllm_v0.PdkvConnector


def test_a_prompt_that_is_not_there_is_computed_and_the_others_arrive(pair):
    producer, consumer = pair("kv_producer", "kv_consumer", lookup_timeout=12)
    produce(producer, SCENARIO)
    caches, [(hidden, bypass)] = consume(consumer, SCENARIO)
    assert (hidden, bypass) == (None, False)
    assert [int(cache[0].flatten(0, 1).any((-2, -1)).sum()) for cache in caches] == [len(A)] * len(caches)


def test_without_its_producer_a_consumer_computes_everything(pair):
    producer, consumer = pair("kv_producer", "kv_consumer")
    waiting = ThreadPoolExecutor().submit(consume, consumer, SCENARIO)
    producer.close()
    caches, [(hidden, bypass)] = waiting.result(timeout=240)
    assert (hidden, bypass) == (None, False)
    assert not any(cache.any() for cache in caches)
    assert consumer.select(torch.tensor(A), torch.ones(len(A), dtype=bool)) == [None] * 5


def test_a_prompt_larger_than_the_buffer_is_left_out_and_said_so(pair, caplog):
    producer, consumer = pair("kv_producer", "kv_consumer", lookup_timeout=0)
    tokens, mask = torch.arange(9), torch.ones(9, dtype=bool)
    producer.insert(tokens, mask, torch.zeros(1 << 21), None, None)
    assert "a prompt of 9 tokens is not sent" in caplog.text
    assert consumer.select(tokens, mask) == [None] * 5


def test_what_is_inserted_may_be_overwritten_afterwards(pair):
    producer, consumer = pair("kv_producer", "kv_consumer")
    tokens, hidden = torch.tensor(A), torch.ones(len(A), 4)
    producer.insert(tokens, torch.ones(len(A), dtype=bool), torch.zeros(2), torch.zeros(2), hidden)
    tokens.zero_()
    hidden.zero_()
    found = consumer.select(torch.tensor(A), None)
    assert found[0].tolist() == list(A)
    assert found[4].eq(1).all()


def test_both_roles_at_both_ends(pair):
    ends = pair("kv_both", "kv_both")
    mask = torch.ones(len(A), dtype=bool)
    assert ends[0].select(torch.tensor(A), mask) == [None] * 5  # asks once
    for mine, other in (ends, reversed(ends)):
        mine.insert(torch.tensor(A), mask, torch.zeros(2), torch.ones(2), None)
        found = other.select(torch.tensor(A), mask)
        assert found[3].tolist() == [1, 1]
        assert found[4] is None


def test_closing_twice_and_while_nobody_takes(pair):
    producer, consumer = pair("kv_producer", "kv_consumer")
    producer.insert(torch.tensor(A), None, None, None, None)
    for _ in range(2):
        producer.close()
        consumer.close()


@pytest.mark.parametrize(("key", "value"), [("lookup_timeout", "soon"), ("drain_timeout", -1)])
def test_settings_that_can_not_be(pair, key, value):
    with pytest.raises(pdkv.ConfigError, match=key):
        pair("kv_producer", "kv_consumer", **{key: value})


@pytest.mark.parametrize(
    "text", [None, "{", "[]", json.dumps({"prefill_url": "host"}), json.dumps({"decode_url": "a:1"})]
)
def test_mooncakes_file_is_checked(monkeypatch, tmp_path, text):
    file = tmp_path / "mooncake.json"
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    if text is not None:
        file.write_text(text)
        monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    with pytest.raises(pdkv.ConfigError, match=r"MOONCAKE_CONFIG_PATH|mooncake\.json"):
        MooncakePipe(0, {"kv_rank": 0, "kv_parallel_size": 2})


def test_the_pipe_of_mooncakes_name_meets_at_its_prefill_side(monkeypatch, tmp_path):
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps({"prefill_url": f"127.0.0.1:{free_ports(4)}", "decode_url": "127.0.0.1:1"}))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    with ThreadPoolExecutor() as pool:
        pipes = pool.map(lambda rank: MooncakePipe(3, {"kv_rank": rank, "kv_parallel_size": 2}, "cpu"), range(2))
    with next(pipes) as left, next(pipes) as right:
        left.send_tensor(torch.arange(3))
        assert right.recv_tensor(120).tolist() == [0, 1, 2]
        reader = threading.Thread(target=right.close)
        reader.start()
        left.close()
        reader.join()
