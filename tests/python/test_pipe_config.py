"""The settings of a pipe, as vLLM 0.8 writes them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import pdkv
from pdkv.pipe import PipeConfig

SEED = (
    '{"kv_connector":"PyNcclConnector","kv_role":"kv_producer","kv_rank":0,"kv_parallel_size":2}',
    '{"kv_connector":"PyNcclConnector","kv_role":"kv_consumer","kv_rank":1,"kv_parallel_size":2}',
)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_json_of_the_first_article(rank):
    config = PipeConfig.from_cli(SEED[rank])
    assert (config.kv_rank, config.kv_parallel_size, config.kv_ip, config.kv_port) == (rank, 2, "127.0.0.1", 14579)
    assert (config.is_kv_producer, config.is_kv_consumer) == (rank == 0, rank == 1)
    assert config.is_kv_transfer_instance
    assert (config.kv_buffer_size, config.store_timeout_s) == (1e9, 300.0)


def test_object_dict_and_itself():
    # The fields of vLLM 0.8.5's class, which is an object with attributes and more of them.
    theirs = SimpleNamespace(
        kv_connector="PyNcclConnector",
        kv_buffer_device="cpu",
        kv_buffer_size=2e6,
        kv_role="kv_both",
        kv_rank=1,
        kv_parallel_size=2,
        kv_ip="127.0.0.1",
        kv_port=20000,
        kv_connector_extra_config={"store_timeout": 5},
        compute_hash=lambda: "",
    )
    config = PipeConfig.of(theirs)
    assert config == PipeConfig.of({name: getattr(theirs, name) for name in PipeConfig.__dataclass_fields__})
    assert PipeConfig.of(config) is config
    assert config.store_timeout_s == 5
    assert config.is_kv_producer
    assert config.is_kv_consumer


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_role": "producer"}, "kv_role"),
        ({"kv_rank": -1}, "kv_rank"),
        ({"kv_rank": True}, "kv_rank"),
        ({"kv_parallel_size": 0}, "kv_parallel_size"),
        ({"kv_port": 0}, "kv_port"),
        ({"kv_port": "1"}, "kv_port"),
        ({"kv_ip": ""}, "kv_ip"),
        ({"kv_buffer_size": 0}, "kv_buffer_size"),
        ({"kv_buffer_size": float("nan")}, "kv_buffer_size"),
        ({"kv_buffer_size": float("inf")}, "kv_buffer_size"),
        ({"kv_connector_extra_config": {"store_timeout": float("inf")}}, "store_timeout"),
        ({"kv_buffer_device": "tpu"}, "kv_buffer_device"),
        ({"kv_connector_extra_config": []}, "kv_connector_extra_config"),
        ({"kv_connector_extra_config": {"store_timeout": "soon"}}, "store_timeout"),
        ({"kv_bufer_size": 1}, "kv_bufer_size"),
    ],
)
def test_bad_settings_are_named(settings, named):
    with pytest.raises(pdkv.ConfigError) as raised:
        PipeConfig.of(settings)
    assert f"`{named}`" in str(raised.value)
    assert raised.value.hint


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '"kv_rank"'])
def test_no_json_object(text):
    with pytest.raises(pdkv.ConfigError):
        PipeConfig.from_cli(text)
