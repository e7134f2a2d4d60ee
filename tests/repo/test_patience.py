"""A test that follows the machine runs again only where the machine was too slow, and else fails as any other."""

from __future__ import annotations

import inspect
import os
import subprocess
import threading

import pytest

import patience


@pytest.fixture
def waited(monkeypatch):
    """What the next looks at the only thread find, in seconds."""
    found = []
    monkeypatch.setattr(patience, "_waits", lambda: {1: found.pop(0)})
    return found


def failing_until(enough_s, tried):
    @patience.follows_the_machine
    def test(patience_s):
        tried.append(patience_s)
        assert patience_s >= enough_s

    return test


def test_a_test_that_passes_runs_once(waited):
    waited[:] = [0.0]
    tried = []
    failing_until(0, tried)()
    assert tried == [3.0]


def test_on_a_quick_machine_a_failure_is_one(waited):
    waited[:] = [5.0, 5.9]
    tried = []
    with pytest.raises(AssertionError):
        failing_until(12, tried)()
    assert tried == [3.0]


def test_on_a_slow_machine_there_is_more_time(waited, capsys):
    waited[:] = [5.0, 6.1, 6.1]
    tried = []
    failing_until(12, tried)()
    assert tried == [3.0, 12.0]
    assert "waited 1.1 s" in capsys.readouterr().out


def test_with_the_longest_time_a_failure_is_one_on_every_machine(waited):
    waited[:] = [0.0, 10.0, 10.0, 20.0, 20.0, 99.0]
    tried = []
    with pytest.raises(AssertionError):
        failing_until(1000, tried)()
    assert tried == [3.0, 12.0, 48.0]


def test_an_error_that_does_not_come_is_a_failure_as_any_other(waited):
    waited[:] = [5.0, 6.1, 6.1]
    tried = []

    @patience.follows_the_machine
    def test(patience_s):
        tried.append(patience_s)
        with pytest.raises(ValueError, match="late"):
            int("late" if patience_s > 3 else "3")

    test()
    assert tried == [3.0, 12.0]


def test_a_test_whose_time_is_over_is_not_tried_again(waited):
    waited[:] = [0.0, 100.0]
    tried = []

    @patience.follows_the_machine
    def test(patience_s):
        tried.append(patience_s)
        pytest.fail("Timeout (>900.0s) from pytest-timeout.")

    with pytest.raises(pytest.fail.Exception):
        test()
    assert tried == [3.0]


def test_threads_here_and_of_children_are_looked_at():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        found = patience._waits()
        assert {threading.get_native_id(), child.pid} <= set(found)
        assert os.getppid() not in found
        child.stdin.close()


def test_fixtures_are_asked_for_as_without_it():
    @patience.follows_the_machine
    def test(start, patience_s, transport):
        pass

    assert list(inspect.signature(test).parameters) == ["start", "transport"]
