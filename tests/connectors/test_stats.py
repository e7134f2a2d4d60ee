"""What the worker side counts: plain, bounded, and adding up."""

from __future__ import annotations

import json
import threading

from pdkv.connectors.core.stats import COUNTERS, SAMPLES, Stats, aggregate, reduce


def some(stats, number=1, seconds=0.5):
    for _ in range(number):
        stats.transfer(seconds=seconds, post_seconds=0.001, nbytes=2_000_000, descriptors=7, path="shm")


def test_a_look_takes_what_there_is():
    stats = Stats()
    assert stats.snapshot_and_reset() is None
    some(stats)
    stats.count("num_declined", 3)
    values = stats.snapshot_and_reset()
    assert values["xfer_time_seconds"] == [0.5]
    assert values["post_time_seconds"] == [0.001]
    assert values["bytes_transferred"] == [2_000_000]
    assert values["num_descriptors"] == [7]
    assert values["num_declined"] == 3
    assert values["paths"] == {"shm": 1}
    assert json.loads(json.dumps(values)) == values
    assert stats.snapshot_and_reset() is None


def test_samples_are_bounded_and_what_is_left_out_is_counted():
    stats = Stats()
    some(stats, 5000)
    values = stats.snapshot_and_reset()
    assert len(values["xfer_time_seconds"]) == 4096
    assert values["num_dropped_samples"] == 904
    assert values["paths"] == {"shm": 5000}
    assert reduce(values)["transfers"] == 5000


def test_snapshots_add_up_and_stay_as_they_are():
    stats = Stats()
    some(stats, 2)
    stats.count("num_failed_transfers")
    one = stats.snapshot_and_reset()
    some(stats, 3, seconds=1.5)
    stats.transfer(seconds=1.0, post_seconds=0.1, nbytes=1, descriptors=1, path="tcp")
    other = stats.snapshot_and_reset()
    before = json.dumps([one, other])
    both = aggregate(one, other)
    assert json.dumps([one, other]) == before
    assert both["xfer_time_seconds"] == [0.5, 0.5, 1.5, 1.5, 1.5, 1.0]
    assert both["num_failed_transfers"] == 1
    assert both["paths"] == {"shm": 5, "tcp": 1}
    assert aggregate(both, {}) == both
    assert aggregate({}, both) == both


def test_a_sum_that_nobody_resets_is_bounded():
    stats = Stats()
    some(stats, 4096)
    part = stats.snapshot_and_reset()
    total = {}
    for _ in range(20):
        total = aggregate(total, part)
    assert {len(total[name]) for name in SAMPLES} == {1 << 16}
    assert total["num_dropped_samples"] == 20 * 4096 - (1 << 16)
    assert reduce(total)["transfers"] == 20 * 4096


def test_a_log_line_has_means_totals_and_only_counters_that_moved():
    stats = Stats()
    some(stats, 10)
    stats.count("num_kv_expired_reqs", 2)
    line = reduce(stats.snapshot_and_reset())
    assert line["transfers"] == 10
    assert line["mean transfer (ms)"] == line["p90 transfer (ms)"] == 500
    assert line["mean size (MB)"] == 2
    assert line["rate (MB/s)"] == 4
    assert line["by shm"] == 10
    assert line["kv expired reqs"] == 2
    assert "failed transfers" not in line
    assert all(isinstance(value, int | float) for value in line.values())


def test_nothing_is_a_short_line():
    assert reduce({}) == {"transfers": 0}
    assert reduce(aggregate({}, {})) == {"transfers": 0}


def test_threads_lose_nothing():
    stats = Stats()
    threads = [threading.Thread(target=lambda: [stats.count("num_declined") for _ in range(2000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    taken = 0
    while any(thread.is_alive() for thread in threads):
        taken += (stats.snapshot_and_reset() or {}).get("num_declined", 0)
    for thread in threads:
        thread.join()
    taken += (stats.snapshot_and_reset() or {}).get("num_declined", 0)
    assert taken == 16_000


def test_names_are_those_that_are_scraped():
    assert SAMPLES == ("xfer_time_seconds", "post_time_seconds", "bytes_transferred", "num_descriptors")
    assert {"num_failed_transfers", "num_failed_notifications", "num_kv_expired_reqs"} <= set(COUNTERS)
    assert {"num_notifications_after_expiry", "num_refused_references", "num_recomputed_requests"} <= set(COUNTERS)
    assert {"num_fenced_reads", "num_declined"} <= set(COUNTERS)
