"""Where engines are reached, and over what, when the usual way is closed."""

from __future__ import annotations

import pytest

import pdkv

BLOCKS = list(range(8))


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_addresses_of_both_families(start, listen):
    consumer = start("consumer", listen=None)
    try:
        producer = start("producer", seed=1, listen=listen)
    except pdkv.ConfigError as error:
        pytest.skip(f"this system has no such address: {error}")
    consumer.do("connect", producer.address)
    _, reference = producer.do("export", BLOCKS)
    assert consumer.do("try_pull", reference, BLOCKS)["state"] == "done"
    assert consumer.do("wrong", 1, [(block, block) for block in BLOCKS]) == []


def test_untraceable_peers_take_unix_domain_streams(start):
    everything = {"transports": ["shm", "cma", "tcp"]}
    consumer = start("consumer", "unix", **everything)
    producer = start("producer", "unix", seed=1, **everything)
    consumer.do("connect", producer.address)
    _, reference = producer.do("export", BLOCKS, consumers=3)
    outcome = consumer.do("try_pull", reference, BLOCKS)
    assert outcome["state"] == "done"
    assert outcome["path"] == "tcp"
    assert "unix-domain" in outcome["detail"]
    outcome = consumer.do("try_pull", reference, BLOCKS, require="cma")
    assert isinstance(outcome["error"], pdkv.UnsupportedError)
    assert consumer.do("wrong", 1, [(block, block) for block in BLOCKS]) == []
