"""What `pdkv.testing` gives to others."""

from __future__ import annotations

import pytest

import pdkv
from pdkv.testing import connected_pair, simulated


def test_a_pair_is_connected_both_ways():
    with connected_pair(transports=["tcp"]) as pair:
        assert pair.to_producer.name == pair.producer.name == "producer"
        assert pair.to_consumer.name == pair.consumer.name == "consumer"
        assert [name for name, usable, _ in pair.to_producer.links() if usable] == ["tcp"]
    assert pair.producer.closed
    assert pair.consumer.closed


def test_a_seed_is_a_history():
    history = simulated(7)
    assert history.violations == []
    assert history.begun == history.done + history.failed + history.cancelled + history.crashed > 0
    assert simulated(7) == history
    assert simulated(8) != history


def test_a_quiet_world():
    history = simulated(7, faults=False, exports=5, engines=2)
    assert (history.violations, history.crashes) == ([], 0)
    with pytest.raises(pdkv.ConfigError, match="span_s"):
        simulated(7, span_s=-1)
