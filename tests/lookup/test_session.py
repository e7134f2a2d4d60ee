"""Both ends of a lookup buffer over pipes that move nothing: takings, givings back, forged and garbled words, ends."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from itertools import count

import numpy as np
import pytest

import pdkv
from lookup.fake_pipe import fake_pair
from pdkv.lookup_buffer import LookupBuffer, words
from pdkv.lookup_buffer.remote import Remote
from pdkv.lookup_buffer.server import MAX_OPEN, Session
from pdkv.lookup_buffer.words import Kind, Word, pack, unpack


def ints(*tokens):
    return np.array(tokens, np.int64)


def until(true, what, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.001)


class Ends:
    """A producer's buffer with sessions to any number of consumers."""

    def __init__(self):
        self.buffer = LookupBuffer()
        self.threads = []

    def consumer(self, hold_s=60.0):
        """The consumer's end of a pipe that is served."""
        ours, theirs = fake_pair()
        session = Session(self.buffer._shelves, ours, "consumer", hold_s)
        self.buffer._sessions.add(session)
        thread = threading.Thread(target=session.run, daemon=True)
        thread.start()
        self.threads.append(thread)
        theirs.served, theirs.session = thread, session
        theirs.producer = ours
        return theirs

    def remote(self):
        return Remote(self.consumer(), "producer")

    def insert(self, *tokens):
        self.buffer.insert(ints(*tokens), None, None, np.ones(4), None)


@pytest.fixture
def ends():
    ends = Ends()
    yield ends
    for session in list(ends.buffer._sessions):
        session.cut()
    for thread in ends.threads:
        thread.join(60)
        assert not thread.is_alive()
    ends.buffer.close()
    assert ends.buffer.used_bytes == 0


def ask(pipe, request, *tokens, kind=Kind.SELECT, number=0):
    pipe.send_message(pack(Word(kind, request, number)), [ints(*tokens)] if tokens else [])


def heard(pipe):
    tag, tensors = pipe.recv_message(60)
    return unpack(tag), tensors


def test_an_entry_is_gone_when_the_consumer_has_said_so(ends):
    remote = ends.remote()
    ends.insert(1, 2)
    selection = remote.select(ints(1), longest=False, blocks=False).start()
    assert selection.hit(60).matched == 1
    assert (len(ends.buffer), ends.buffer.used_bytes) == (0, 48)
    assert selection.wait(60)[0].tolist() == [1, 2]
    until(lambda: ends.buffer.used_bytes == 0, "the end of the entry")
    remote.close()


def test_a_miss_waits_and_peek_does_not(ends):
    remote = ends.remote()
    waiting = remote.select(ints(5), longest=False, blocks=False).start()
    assert remote.peek(ints(5), longest=False, blocks=False, timeout_s=60) is None
    ends.insert(5, 6)
    assert waiting.wait(60)[0].tolist() == [5, 6]
    ends.insert(5, 6)
    assert remote.peek(ints(5, 6, 7), longest=False, blocks=False, timeout_s=60) == 2
    assert remote.peek(None, longest=False, blocks=False, timeout_s=60) == 2
    remote.close()


@pytest.mark.parametrize("found", [False, True])
def test_a_cancelled_request_gives_its_entry_to_others(ends, found):
    remote, other = ends.remote(), ends.remote()
    if found:
        ends.insert(1)
    selection = remote.select(ints(1), longest=False, blocks=False).start()
    if found:
        selection.hit(60)
    selection.cancel()
    remote.peek(None, longest=False, blocks=False, timeout_s=60)  # whatever was said before has been heard
    if not found:
        ends.insert(1)
    assert other.select(ints(1), longest=False, blocks=False).start().wait(60)[0].tolist() == [1]
    until(lambda: ends.buffer.used_bytes == 0, "the end of the entry")
    remote.close()
    other.close()


def test_a_cancel_that_crosses_the_entry_on_its_way(ends):
    pipe = ends.consumer()
    ends.insert(1)
    ask(pipe, 0, 1)
    ask(pipe, 0, kind=Kind.CANCEL)
    ask(pipe, 1, 1, kind=Kind.PEEK)
    assert heard(pipe)[0].kind is Kind.HIT  # of request 0, which is not wanted any more
    assert heard(pipe)[0] == Word(Kind.HIT, 1, 1)  # and the entry is back before that was read
    # It still counts: the pipe holds it until the consumer has read and said so.
    assert ends.buffer.drop_select(ints(1), timeout_s=60)[0].tolist() == [1]
    assert ends.buffer.used_bytes == 40
    ask(pipe, 0, kind=Kind.BACK)
    until(lambda: ends.buffer.used_bytes == 0, "the end of the entry")


def test_a_consumer_that_dies_between_match_and_taken_loses_nothing(ends):
    pipe, other = ends.consumer(), ends.remote()
    ends.insert(1)
    ends.insert(2)
    ask(pipe, 0)
    assert heard(pipe)[0].kind is Kind.HIT
    waiting = other.select(ints(1), longest=False, blocks=False).start()
    assert not waiting.done
    pipe.abort()
    assert waiting.wait(60)[0].tolist() == [1]
    assert other.select(None, longest=False, blocks=False).start().wait(60)[0].tolist() == [2]
    other.close()


def test_a_consumer_that_keeps_silent_is_cut_off(ends, caplog):
    pipe = ends.consumer(hold_s=0.05)
    ask(pipe, 0, 1)
    ends.insert(1)
    with caplog.at_level(logging.WARNING, "pdkv.lookup"):
        pipe.served.join(60)
    assert "neither taken nor given back" in caplog.text
    assert ends.buffer.drop_select(ints(1), timeout_s=0)[0].tolist() == [1]


def test_a_waiting_consumer_may_keep_silent(ends):
    pipe = ends.consumer(hold_s=0.02)
    ask(pipe, 0, 1)
    pipe.served.join(0.2)
    assert pipe.served.is_alive()
    pipe.session._hold_s = 600.0  # from here on it is this test that may be late
    ends.insert(1)
    assert heard(pipe)[0].kind is Kind.HIT
    ask(pipe, 0, kind=Kind.TAKEN)
    until(lambda: ends.buffer.used_bytes == 0, "the end of the entry")


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x01",
        b"\xff" * 17,
        pack(Word(Kind.SELECT, 5, 77)),
        pack(Word(Kind.TAKEN, 3)),
        pack(Word(Kind.BACK, 0)),
        pack(Word(Kind.HIT, 0)),
        pack(Word(Kind.SELECT, 0)),
        b"\x01" + b"a" * (64 << 10),
    ],
    ids=["empty", "short", "noise", "flags", "taken", "back", "hit", "again", "long"],
)
def test_a_consumer_that_talks_nonsense_is_cut_off_and_hurts_nobody(ends, garbage):
    pipe, other = ends.consumer(), ends.remote()
    ends.insert(1)
    ends.insert(2)
    ask(pipe, 0, 7)
    pipe.send_message(garbage)
    pipe.served.join(60)
    assert not pipe.served.is_alive()
    found = [other.select(None, longest=False, blocks=False).start().wait(60)[0].tolist() for _ in range(2)]
    assert found == [[1], [2]]
    other.close()


@pytest.mark.parametrize("tensors", [[np.zeros(3)], [np.zeros((2, 2), np.int64)], [ints(1), ints(2)]], ids=str)
def test_tokens_that_are_none_cut_off_the_consumer(ends, tensors):
    pipe = ends.consumer()
    pipe.send_message(pack(Word(Kind.SELECT, 0)), tensors)
    pipe.served.join(60)
    assert not pipe.served.is_alive()


def test_a_request_too_many_is_refused(ends):
    pipe = ends.consumer()
    for number in range(MAX_OPEN + 1):
        ask(pipe, number, 1)
    word, _ = heard(pipe)
    assert (word.kind, word.request) == (Kind.REFUSED, MAX_OPEN)
    assert isinstance(words.error_of(word), pdkv.CapacityError)


def test_requests_of_too_many_tokens_are_refused(ends, monkeypatch):
    monkeypatch.setattr("pdkv.lookup_buffer.server.MAX_TOKENS", 5)
    pipe = ends.consumer()
    ask(pipe, 0, 1, 2, 3)
    ask(pipe, 1, 4, 5, 6)
    ask(pipe, 2, 4, 5)
    word, _ = heard(pipe)
    assert (word.kind, word.request) == (Kind.REFUSED, 1)
    ends.insert(4)
    assert heard(pipe)[0].request == 2
    ask(pipe, 2, kind=Kind.TAKEN)
    until(lambda: ends.buffer.used_bytes == 0, "the end of the entry")


@pytest.mark.parametrize(
    "forged",
    [
        pack(Word(Kind.HIT, 9)),
        pack(Word(Kind.MISS, 0)),
        pack(Word(Kind.HIT, 0, 1, b"{}")),
        pack(Word(Kind.HIT, 0, 1)),
        pack(Word(Kind.HIT, 0, 0)),
        pack(Word(Kind.SELECT, 0)),
        b"junk",
    ],
    ids=["other", "miss", "blocks", "lie", "nothing", "select", "junk"],
)
def test_a_forged_answer_ends_the_connection_and_every_wait(forged):
    ours, theirs = fake_pair()
    remote = Remote(theirs, "producer")
    selections = [remote.select(ints(1), longest=False, blocks=False).start() for _ in range(2)]
    ours.send_message(forged, [None] * 5 if forged[0] == Kind.HIT else [])
    for selection in selections:
        with pytest.raises(pdkv.IntegrityError):
            selection.wait(60)
    assert not remote.alive
    with pytest.raises(pdkv.IntegrityError):
        remote.peek(None, longest=False, blocks=False, timeout_s=60)


def test_an_entry_that_nobody_can_have_is_one_requesters_error_and_gone(ends):
    pipe = ends.consumer()
    for number in range(600):  # more than a call stack would take
        ask(pipe, number, 1)
    ask(pipe, 600, 1, kind=Kind.PEEK)
    assert heard(pipe)[0].kind is Kind.MISS
    pipe.producer.refuse = pdkv.UnsupportedError("a tensor of dtype `odd`")
    ends.insert(1)
    word, _ = heard(pipe)
    assert (word.request, type(words.error_of(word))) == (0, pdkv.UnsupportedError)
    assert "odd" in str(words.error_of(word))
    assert ends.buffer.used_bytes == 0
    pipe.producer.refuse = None
    ends.insert(1)
    assert heard(pipe)[0] == Word(Kind.HIT, 1, 1)


def test_an_entry_that_comes_back_from_everybody_goes_through_a_loop(ends):
    pipe, other = ends.consumer(), ends.consumer()
    for number in range(600):
        ask(pipe, number, 1)
    ask(pipe, 600, 1, kind=Kind.PEEK)
    assert heard(pipe)[0].kind is Kind.MISS
    pipe.producer.refuse = pdkv.CapacityError("not now")
    ends.insert(1)
    assert len(ends.buffer) == 1
    ask(other, 0, 1)
    assert heard(other)[0] == Word(Kind.HIT, 0, 1)
    ask(other, 0, kind=Kind.TAKEN)


def test_a_consumer_that_asks_and_never_listens_is_cut_off(ends):
    pipe = ends.consumer()
    ask(pipe, 0, 1)
    ask(pipe, 1, 1, kind=Kind.PEEK)
    assert heard(pipe)[0].kind is Kind.MISS
    pipe.producer.refuse = pdkv.TransferTimeoutError("the pipe is full of what nobody reads")
    ends.insert(1)
    pipe.served.join(60)
    assert not pipe.served.is_alive()
    assert ends.buffer.drop_select(ints(1), timeout_s=60)[0].tolist() == [1]


def test_a_taking_of_what_was_cancelled_is_forged_and_costs_nothing(ends):
    pipe = ends.consumer()
    ends.insert(1)
    ask(pipe, 0, 1)
    assert heard(pipe)[0].kind is Kind.HIT
    ask(pipe, 0, kind=Kind.CANCEL)
    ask(pipe, 0, kind=Kind.TAKEN)
    pipe.served.join(60)
    assert not pipe.served.is_alive()
    assert ends.buffer.drop_select(ints(1), timeout_s=60)[0].tolist() == [1]
    assert ends.buffer.used_bytes == 0


def test_a_consumer_that_talks_of_other_things_is_cut_off_as_well(ends, monkeypatch):
    monkeypatch.setattr("pdkv.lookup_buffer.server._GRACE_S", 0.05)
    pipe = ends.consumer(hold_s=0.05)
    ends.insert(1)
    ask(pipe, 0, 1)

    def chat():
        for number in count(1):
            ask(pipe, number, 9, kind=Kind.PEEK)

    with pytest.raises(pdkv.PeerLostError):
        chat()
    assert ends.buffer.drop_select(ints(1), timeout_s=60)[0].tolist() == [1]


def test_an_error_that_is_kept_is_raised_as_new_each_time(ends):
    remote = ends.remote()
    waiting = remote.select(ints(1), longest=False, blocks=False).start()
    remote.close()
    stacks = set()
    for _ in range(20):
        for call in (lambda: remote.peek(None, longest=False, blocks=False, timeout_s=60), lambda: waiting.wait(60)):
            with pytest.raises(pdkv.ClosedError) as caught:
                call()
            stacks.add(len(list(traceback.walk_tb(caught.value.__traceback__))))
    assert max(stacks) < 10, "the stacks of earlier calls are kept"


def test_close_of_the_producer_ends_the_waits_of_consumers(ends):
    remote = ends.remote()
    waiting = remote.select(ints(1), longest=False, blocks=False).start()
    ends.buffer.close()
    for session in list(ends.buffer._sessions):
        session.say_goodbye()
    with pytest.raises(pdkv.ClosedError, match="other end"):
        waiting.wait(60)
    until(lambda: not remote.alive, "the end of the connection")


def test_many_consumers_share_what_is_inserted(ends):
    remotes = [ends.remote() for _ in range(4)]
    found = []

    def consume(remote):
        while (token := remote.select(None, longest=False, blocks=False).start().wait(60)[0][0]) >= 0:
            found.append(int(token))

    threads = [threading.Thread(target=consume, args=(remote,), daemon=True) for remote in remotes]
    for thread in threads:
        thread.start()
    for token in [*range(200), *[-1] * len(remotes)]:
        ends.insert(token)
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(200))
    for remote in remotes:
        remote.close()
