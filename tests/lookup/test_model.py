"""`LookupBuffer` is held to a list that is scanned, in whatever order of operations hypothesis finds."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

import pdkv
from lookup.fake_pipe import fake_pair
from pdkv.lookup_buffer import LookupBuffer
from pdkv.lookup_buffer.remote import Remote
from pdkv.lookup_buffer.server import Session

MATCHES = ("either_prefix", "longest_prefix")
tokens = strategies.lists(strategies.integers(0, 2), max_size=5)
masks = strategies.none() | strategies.lists(strategies.booleans(), min_size=5, max_size=5)


def array(values):
    return np.array(values, np.int64)


def masked(values, mask):
    return list(values) if mask is None else [value for value, counts in zip(values, mask, strict=False) if counts]


def score(one, other):
    shared = min(len(one), len(other))
    return shared if one[:shared] == other[:shared] else 0


class Naive:
    """The rules word by word. Entries are [serial, keys, out], in a list that begins where the order begins."""

    def __init__(self):
        self.entries = []
        self.waiting = []  # (request, keys or None), in the order in which they came
        self.given = {}  # request -> entry

    def find(self, keys, match):
        seen = [
            (entry, len(entry[1]) if keys is None else score(entry[1], keys)) for entry in self.entries if not entry[2]
        ]
        if keys is None:
            return seen[0] if seen else None
        most = max([found for _, found in seen], default=0)
        least = most if match == "longest_prefix" else 1
        return next(((entry, found) for entry, found in seen if found and found >= least), None)

    def give(self, entry, request):
        at = self.entries.index(entry)
        entry[2] = True
        self.entries = self.entries[at + 1 :] + self.entries[: at + 1]
        self.given[request] = entry

    def offer(self, entry):
        for request, keys in self.waiting:
            if keys is None or score(entry[1], keys):
                self.waiting.remove((request, keys))
                self.give(entry, request)
                return

    def insert(self, serial, keys):
        entry = [serial, keys, False]
        last = max((at for at, other in enumerate(self.entries) if not other[2]), default=-1)
        self.entries.insert(last + 1, entry)
        self.offer(entry)

    def ask(self, request, keys, match):
        found = self.find(keys, match)
        if found is None:
            self.waiting.append((request, keys))
        else:
            self.give(found[0], request)

    def cancel(self, request):
        self.waiting = [waiting for waiting in self.waiting if waiting[0] is not request]
        entry = self.given.pop(request, None)
        if entry is None:
            return
        at = self.entries.index(entry)
        entry[2] = False
        if all(other[2] for other in self.entries[at + 1 :]):
            self.entries = self.entries[at:] + self.entries[:at]
        self.offer(entry)

    def take(self, request):
        entry = self.given.pop(request)
        self.entries.remove(entry)
        return entry[0]


class Comparison(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.producer = self.consumer = LookupBuffer()
        self.naive = Naive()
        self.serial = 0

    def settled(self):
        """Everything that was said has been heard at both ends."""

    def teardown(self):
        self.consumer.close()
        self.producer.close()

    @rule(values=tokens, mask=masks)
    def insert(self, values, mask):
        self.serial += 1
        self.producer.insert(
            array(values), mask and np.array(mask[: len(values)], bool), None, None, array([self.serial])
        )
        self.naive.insert(self.serial, masked(values, mask))
        self.settled()

    @rule(values=strategies.none() | tokens, mask=masks, match=strategies.sampled_from(MATCHES))
    def drop_select(self, values, mask, match):
        keys = None if values is None else masked(values, mask)
        found = self.naive.find(keys, match)
        arguments = (None, None) if values is None else (array(values), mask and np.array(mask[: len(values)], bool))
        assert self.consumer.peek(*arguments, match=match) == (None if found is None else found[1])
        if found is None:
            with pytest.raises(pdkv.TransferTimeoutError):
                self.consumer.drop_select(*arguments, timeout_s=0, match=match)
            return
        self.naive.give(found[0], "now")
        assert int(self.consumer.drop_select(*arguments, timeout_s=0, match=match)[4][0]) == self.naive.take("now")
        self.settled()

    @rule(target=requests, values=strategies.none() | tokens, match=strategies.sampled_from(MATCHES))
    def select(self, values, match):
        request = self.consumer.select(None if values is None else array(values), match=match)
        self.naive.ask(request, values, match)
        self.settled()
        return request

    @rule(request=consumes(requests))
    def cancel(self, request):
        request.cancel()
        self.naive.cancel(request)
        self.settled()

    @rule(target=requests, request=consumes(requests))
    def wait(self, request):
        assert request.done == (request in self.naive.given)
        if not request.done:
            return request
        assert int(request.wait(0)[4][0]) == self.naive.take(request)
        self.settled()
        return multiple()

    @invariant()
    def they_hold_the_same(self):
        assert len(self.producer) == sum(not entry[2] for entry in self.naive.entries)


class RemoteComparison(Comparison):
    """The same with a consumer at the other end of a pipe."""

    def __init__(self):
        super().__init__()
        ours, theirs = fake_pair()
        session = Session(self.producer._shelves, ours, "consumer", 60.0)
        self.thread = threading.Thread(target=session.run, daemon=True)
        self.thread.start()
        self.consumer = LookupBuffer()
        self.consumer._remote = Remote(theirs, "producer")

    def settled(self):
        # Words come in order, and the one who answers this has heard all before.
        self.consumer.peek(None)

    def teardown(self):
        super().teardown()
        self.thread.join(60)
        assert self.producer.used_bytes == 0


class TestComparison(Comparison.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestRemoteComparison(RemoteComparison.TestCase):
    settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
