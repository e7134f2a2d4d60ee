"""What a consumer fetches, from whom, into which blocks; and that each export is answered exactly once."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connectors.tickets import BLOCK_TOKENS, answer, changed, read
from pdkv.connectors.core.consumer import Consumer
from pdkv.connectors.core.digest import prefix_digest
from pdkv.connectors.core.reading import Reader
from pdkv.connectors.core.work import Work

TOKENS = list(range(70))


def consumer(groups=1, *, name="engine-d", tokens=BLOCK_TOKENS, on_refused=lambda request_id, error: None):
    sizes = [tokens] * groups
    return Consumer(name, Reader(sizes, tp_size=1, pp_size=1), sizes, 30.0, on_refused)


def digest(num_tokens):
    return prefix_digest(TOKENS, num_tokens)


def admit(c, request_id="d-1", params=None, *, blocks=(range(11, 16),), computed=0, prompt=70):
    """A request that arrives, is matched and gets blocks."""
    c.arrived(request_id, answer() if params is None else params, prompt)
    external, _ = c.match(request_id, computed)
    c.allocated(request_id, [list(ids) for ids in blocks], external, digest)
    return external


def test_a_whole_prompt_is_fetched_block_by_block():
    c = consumer()
    assert admit(c) == 70
    (pull,) = c.take().pulls
    assert (pull.into, pull.first_blocks, pull.num_tokens) == ((tuple(range(11, 16)),), (0,), 70)
    assert (pull.producer.host, pull.producer.port, pull.producer.engine_id) == ("127.0.0.1", 5600, "engine-p")


def test_the_digest_is_of_our_own_prompt_and_of_the_answer():
    c = consumer()
    admit(c)
    (pull,) = c.take().pulls
    reference = json.loads(pull.references[0][0])
    assert pull.digest.hex() == reference["digest"]
    assert len(pull.digest) <= 64
    params = changed(answer(), ["pdkv", "request_id"], "p-9")
    params["remote_request_id"] = "p-9"
    admit(c, "d-2", params)
    (forged,) = c.take().pulls
    assert forged.digest.hex() != json.loads(forged.references[0][0])["digest"]


@pytest.mark.parametrize(("computed", "into", "first"), [(16, range(12, 16), 1), (64, [15], 4)])
def test_a_local_hit_leaves_the_rest_to_fetch(computed, into, first):
    c = consumer()
    assert admit(c, computed=computed) == 70 - computed
    (pull,) = c.take().pulls
    assert (pull.into, pull.first_blocks) == ((tuple(into),), (first,))


def test_a_prompt_that_has_one_token_more_fetches_what_there_is():
    c = consumer()
    assert admit(c, prompt=71) == 70
    assert len(c.take().pulls) == 1


def test_a_full_local_hit_lets_the_producer_go():
    c = consumer()
    c.arrived("d-1", answer(tokens=range(64), blocks=(range(1, 5),)), 70)
    assert c.match("d-1", 64) == (0, False)
    c.allocated("d-1", [list(range(11, 16))], 0, digest)
    work = c.take()
    assert (len(work.declines), work.pulls, work.unwatches) == (1, (), ("d-1",))
    c.finished("d-1")
    assert c.take() is Work.NOTHING


def test_tokens_that_the_engine_does_without_let_the_producer_go():
    c = consumer()
    c.arrived("d-1", answer(), 70)
    assert c.match("d-1", 0) == (70, True)
    c.allocated("d-1", [list(range(11, 16))], 0, digest)
    assert len(c.take().declines) == 1
    assert c.match("d-1", 0) == (0, False)


def test_matching_has_no_effect():
    c = consumer()
    c.arrived("d-1", answer(), 70)
    c.take()
    assert [c.match("d-1", computed) for computed in (0, 16, 0)] == [(70, True), (54, True), (70, True)]
    assert not c.take()


def test_a_request_is_fetched_once():
    c = consumer()
    admit(c)
    c.allocated("d-1", [list(range(11, 16))], 0, digest)  # when it is scheduled after the load
    assert c.match("d-1", 0) == (0, False)  # when it is preempted, or its load failed
    c.loaded(["d-1"])
    assert c.match("d-1", 0) == (0, False)
    assert len(c.take().pulls) == 1


def test_a_lease_is_watched_from_arrival_on():
    c = consumer()
    c.arrived("d-1", answer(), 70)
    (watch,) = c.take().watches
    assert (watch.request_id, watch.lease_s, watch.producer.port) == ("d-1", 30.0, 5600)


def test_a_request_aborted_while_it_waits_lets_the_producer_go():
    c = consumer()
    c.arrived("d-1", answer(), 70)
    c.finished("d-1")
    work = c.take()
    assert (len(work.declines), work.unwatches, c.alive) == (1, ("d-1",), 0)


@pytest.mark.parametrize("prompt", [1, 70])
def test_a_request_that_was_rejected_lets_the_producer_go(prompt):
    """Where a prompt is too long, say, vLLM adds the request only to have it finished."""
    c = consumer()
    c.arrived("d-1", changed(answer(), ["remote_num_tokens"], 70 if prompt == 1 else 64), prompt)
    c.finished("d-1")
    (decline,) = c.take().declines
    assert decline.references == read(answer(), 70)[0].references


def test_parameters_that_name_nothing_leave_nothing_to_do():
    c = consumer()
    c.arrived("d-1", {"do_remote_prefill": True, "remote_engine_id": "e", "pdkv": {"references": 3}}, 70)
    c.finished("d-1")
    assert not c.take()


def test_a_request_aborted_during_its_load_is_cancelled():
    c = consumer()
    admit(c)
    c.take()
    c.finished("d-1")
    work = c.take()
    assert (work.cancels, work.declines) == (("d-1",), ())
    c.loaded(["d-1"])
    assert not c.take()


def test_parameters_that_cannot_be_believed_are_a_failed_load():
    refused = []
    c = consumer(on_refused=lambda request_id, error: refused.append((request_id, error.kind)))
    assert admit(c, params=changed(answer(), ["remote_num_tokens"], 64)) == 70
    work = c.take()
    assert [(item.request_id, item.kind) for item in work.refusals] == [("d-1", "reference_forged")]
    assert (work.pulls, work.watches, refused) == ((), (), [("d-1", "reference_forged")])
    assert len(work.declines) == 1
    assert c.match("d-1", 0) == (0, False)


def test_other_groups_than_ours_are_a_failed_load():
    c = consumer()
    admit(c, params=answer(blocks=(range(1, 6), range(1, 6))))
    assert [item.kind for item in c.take().refusals] == ["layout"]


@pytest.mark.parametrize(
    ("theirs", "ours", "tokens"),
    [
        (answer(), (range(11, 16),), 32),
        (answer(), (range(11, 14),), BLOCK_TOKENS),
        (answer(blocks=([0, 0, 3, 4, 5],)), (range(11, 16),), BLOCK_TOKENS),
    ],
    ids=["block size", "too few blocks", "a block that the producer dropped"],
)
def test_blocks_that_do_not_pair_are_a_failed_load_and_a_declined_export(theirs, ours, tokens):
    c = consumer(len(ours), tokens=tokens)
    admit(c, params=theirs, blocks=ours)
    work = c.take()
    assert [item.kind for item in work.refusals] == ["layout"]
    assert (len(work.declines), work.pulls) == (1, ())


def test_windows_pair_by_position():
    c = consumer(2)
    theirs = answer(blocks=([0, 0, 3, 4, 5], range(1, 6)))
    admit(c, params=theirs, blocks=([0, 0, 0, 24, 25], range(11, 16)))
    (pull,) = c.take().pulls
    assert pull.into == ((24, 25), tuple(range(11, 16)))
    assert pull.first_blocks == (1, 0)


def test_a_group_that_needs_nothing_is_left_out():
    c = consumer(2)
    theirs = answer(blocks=([0, 0, 0, 0, 0], range(1, 6)))
    admit(c, params=theirs, blocks=([0] * 5, range(11, 16)))
    (pull,) = c.take().pulls
    assert pull.into == ((), tuple(range(11, 16)))


def test_children_are_fetched_for_once():
    c = consumer()
    for child in ("0_x", "1_x", "2_x"):
        c.arrived(child, answer(), 70)
    assert c.match("1_x", 0) == (None, False)
    assert c.match("0_x", 0) == (70, True)
    c.allocated("0_x", [list(range(11, 16))], 70, digest)
    assert c.match("2_x", 0) == (None, False)
    c.loaded(["0_x"])
    assert c.match("1_x", 64) == (0, False)
    work = c.take()
    assert (len(work.pulls), len(work.watches)) == (1, 1)
    for child in ("0_x", "1_x", "2_x"):
        c.finished(child)
    assert not c.take()
    assert c.alive == 0


def test_a_prompt_that_is_another_leaves_the_export_to_its_own_consumer():
    c = consumer()
    assert admit(c, prompt=64) == 64
    work = c.take()
    assert [item.kind for item in work.refusals] == ["reference_digest"]
    assert work.declines == ()


def test_a_child_with_an_answer_of_no_groups_is_refused():
    c = consumer()
    params = changed(changed(answer(), ["pdkv", "groups"], []), ["pdkv", "references"], [[]])
    assert admit(c, "0_x", changed(params, ["remote_block_ids"], [])) == 70
    assert [item.kind for item in c.take().refusals] == ["layout"]


def test_a_bug_while_pairing_is_a_failed_load():
    """The engine waits for what was promised to it."""
    c = consumer()
    c.arrived("d-1", answer(), 70)
    c.match("d-1", 0)

    def broken(num_tokens):
        raise OverflowError("can't convert negative value to unsigned int")

    c.allocated("d-1", [list(range(11, 16))], 70, broken)
    work = c.take()
    assert [item.kind for item in work.refusals] == ["internal"]
    assert (work.pulls, len(work.declines)) == ((), 1)


@pytest.mark.parametrize(("kept", "into"), [(32, (11, 12)), (40, (11, 12, 13))])
def test_an_engine_that_takes_less_than_it_was_told_of_fetches_less(kept, into):
    c = consumer()
    c.arrived("d-1", answer(), 70)
    assert c.match("d-1", 0) == (70, True)
    c.allocated("d-1", [list(range(11, 16))], kept, digest)
    (pull,) = c.take().pulls
    assert (pull.into, pull.first_blocks, pull.num_tokens) == ((into,), (0,), kept)


def test_more_tokens_than_there_are_is_a_failed_load():
    c = consumer()
    c.arrived("d-1", answer(), 90)
    c.match("d-1", 0)
    c.allocated("d-1", [list(range(11, 17))], 80, digest)
    assert [item.kind for item in c.take().refusals] == ["layout"]


def test_what_nothing_can_be_fetched_for_lets_the_producer_go():
    c = consumer()
    c.turned_down(answer())
    c.turned_down(None)
    assert len(c.take().declines) == 1


def test_thousands_of_children_cost_each_a_constant():
    """Leadership passes from one to the next, whoever goes, and nobody looks through all of them."""
    c = consumer()
    names = [f"{index}_x" for index in range(3_000)]
    params = answer()
    for name in names:
        c.arrived(name, params, 70)
    for name in names:
        c.finished(name)
    work = c.take()
    assert (len(work.watches), len(work.declines)) == (3_000, 1)
    assert not c._families


def test_a_child_takes_over_from_one_that_went():
    c = consumer()
    for child in ("0_x", "1_x", "2_x"):
        c.arrived(child, answer(), 70)
    c.take()
    c.finished("0_x")
    work = c.take()
    assert ([watch.request_id for watch in work.watches], work.unwatches, work.declines) == (["1_x"], ("0_x",), ())
    assert (c.match("1_x", 0), c.match("2_x", 0)) == ((70, True), (None, False))
    c.finished("1_x")
    c.finished("2_x")
    assert len(c.take().declines) == 1


def test_an_engine_does_not_fetch_from_itself():
    c = consumer(name="engine-p")
    c.arrived("d-1", answer(), 70)
    assert c.match("d-1", 0) == (0, False)
    work = c.take()
    assert (len(work.declines), work.watches) == (1, ())
    c.finished("d-1")
    assert not c.pending


def test_strangers_with_one_reference_both_ask_for_it():
    """The owner says which of them is too late."""
    c = consumer()
    admit(c, "d-1")
    admit(c, "d-2")
    assert len(c.take().pulls) == 2


class Lives(RuleBasedStateMachine):
    """Requests in any order: each export is pulled or declined exactly once, and nothing is kept."""

    def __init__(self):
        super().__init__()
        self.consumer = consumer()
        self.exports = {}  # reference -> how often it was answered
        self.open = {}  # request -> phase
        self.loading = set()
        self.number = 0

    @rule(family=st.sampled_from(["x", "y", None]), prompt=st.sampled_from([70, 71]))
    def arrive(self, family, prompt):
        self.number += 1
        request_id = f"r{self.number}" if family is None else f"{self.number}_{family}"
        params = answer(f"p-{family or self.number}")
        self.exports.setdefault(read(params, 99)[0].references, 0) if family is None else None
        self.consumer.arrived(request_id, params, prompt)
        self.open[request_id] = "waiting"

    @precondition(lambda self: self.open)
    @rule(data=st.data(), computed=st.sampled_from([0, 16, 64]), dropped=st.booleans())
    def schedule(self, data, computed, dropped):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        external, asynchronous = self.consumer.match(request_id, computed)
        if external is None:
            return
        assert not (external == 0 and asynchronous)
        external = 0 if dropped else external
        self.consumer.allocated(request_id, [list(range(11, 16))], external, digest)
        if external:
            assert request_id not in self.loading
            self.loading.add(request_id)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def load(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.discard(request_id)
        self.consumer.loaded([request_id])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[request_id]
        self.consumer.finished(request_id)

    @invariant()
    def each_export_is_answered_at_most_once(self):
        work = self.consumer.take()
        for answered in (*work.pulls, *work.declines):
            if answered.references in self.exports:
                self.exports[answered.references] += 1
                assert self.exports[answered.references] == 1
        assert self.consumer.alive == len(self.open)

    def teardown(self):
        for request_id in sorted(self.open):
            self.consumer.finished(request_id)
        self.open = {}
        self.each_export_is_answered_at_most_once()
        assert set(self.exports.values()) <= {1}
        assert not self.consumer._families


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
