"""The connector between two stand-in engines of each release of vLLM that changed how it calls connectors.

Requests live through what the trace of the release says, on memory whose contents give away whose KV they are; at the
end every block is free again. Needs no vLLM.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from connectors.llm import Llm
from connectors.llm_memory import NUM_BLOCKS, cache_config
from connectors.llm_requests import Request, Status, engine_config
from connectors.releases import RELEASES, abstract, declared, facts
from connectors.replay import CHANGES, arity, parts, takes
from connectors.stand_in import has, vllm
from pdkv.errors import PdkvError, UnsupportedError

PATIENCE_S = 60.0
# A lease that nobody renews ends after this, where that is how the producer's blocks come free.
SOON_S = 0.2
PROMPT = list(range(100, 122))  # five blocks of four, and a half


class World:
    """A producer and a consumer of one release."""

    def __init__(self, release: str, stack: ExitStack, **options: Any) -> None:
        self.release = release
        # Where the tensors have the form of GPUs, so does the platform.
        self.module = stack.enter_context(vllm(release, "cpu" if has(release, "0.26.0") else "cuda"))
        self.stack = stack
        self.p = self.engine("kv_producer", "p", **options)
        self.d = self.engine("kv_consumer", "d", **options)

    def engine(self, role: str, name: str, **options: Any) -> Llm:
        llm = Llm(self.release, self.module, role, name=f"{name}-{id(self)}", **options)
        self.stack.callback(llm.stop)
        return llm

    def until(self, condition: Callable[[], bool]) -> None:
        """Steps both engines until something holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, (self.p.requests, self.d.requests)
            self.p.step()
            self.d.step()
            time.sleep(0.001)

    def prefill(self, request_id: str = "r", prompt: list[int] = PROMPT) -> dict[str, Any]:
        """What the producer answers to a prompt."""
        request = self.p.submit(Request(request_id, prompt, {"do_remote_decode": True, "do_remote_prefill": False}))
        self.p.step()
        assert request.status is Status.FINISHED_LENGTH_CAPPED
        assert request.answer is not None
        assert request.answer["do_remote_prefill"] is True
        return request.answer

    def decode(self, params: Any, prompt: list[int] = PROMPT, **about: Any) -> Request:
        """Hands a prompt to the consumer."""
        return self.d.submit(Request("d", prompt, copy.deepcopy(params), **about))

    def settle(self) -> None:
        """Everything is over, and nothing is kept."""
        self.until(lambda: not self.p.requests and not self.d.requests)
        for llm in (self.p, self.d):
            assert sorted(llm.free) == list(range(1, NUM_BLOCKS))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=CHANGES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("surplus", [0, 1, 7])
def test_a_prompt_is_prefilled_here_and_decoded_there(release, stack, ranks, surplus):
    world = World(release, stack, ranks=ranks)
    request = world.decode(world.prefill(), PROMPT + list(range(surplus)))
    world.settle()
    assert request.status is Status.FINISHED_LENGTH_CAPPED
    assert request.loads == 1


def test_statistics_cross_processes_as_plain_values(release, stack):
    world = World(release, stack, ranks=2)
    world.decode(world.prefill())
    world.settle()
    told = json.loads(json.dumps(world.d.stats.data))
    assert len(told["bytes_transferred"]) == 2
    again = world.module.PdkvConnector.build_kv_connector_stats(told)
    assert not again.is_empty()
    assert again.reduce() == world.d.stats.reduce()


def test_under_the_name_that_some_routers_know(release, stack):
    world = World(release, stack)
    nixl = importlib.import_module("pdkv.connectors.compat").NixlConnector
    world.p, world.d = (world.engine("kv_both", f"n{number}", connector=nixl) for number in range(2))
    request = world.decode(world.prefill())
    world.settle()
    assert (request.status, request.loads) == (Status.FINISHED_LENGTH_CAPPED, 1)


@pytest.mark.parametrize("local", [4, 12, 20])
def test_what_the_consumer_has_already_is_not_fetched(release, stack, local):
    world = World(release, stack)
    request = world.decode(world.prefill(), local_tokens=local)
    world.settle()
    assert request.status is Status.FINISHED_LENGTH_CAPPED
    assert request.loads == 1


def test_a_full_hit_lets_the_producer_go(release, stack):
    world = World(release, stack)
    request = world.decode(world.prefill(prompt=PROMPT[:20]), local_tokens=20)
    world.settle()
    assert request.status is Status.FINISHED_LENGTH_CAPPED
    assert request.loads == 0


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {"do_remote_prefill": False, "pdkv": {}}])
def test_without_parameters_a_prompt_is_prefilled_where_it_is(release, stack, params):
    world = World(release, stack)
    request = world.decode(params)
    world.settle()
    assert request.status is Status.FINISHED_LENGTH_CAPPED
    assert request.loads == 0


def forged_tokens(params: dict[str, Any]) -> None:
    params["pdkv"]["num_tokens"] = params["remote_num_tokens"] = len(PROMPT) - 1


def forged_blocks(params: dict[str, Any]) -> None:
    first, count = params["pdkv"]["groups"][0]["runs"][0]
    params["pdkv"]["groups"][0]["runs"][0] = [first + 1, count]
    params["remote_block_ids"][0] = [block + 1 for block in params["remote_block_ids"][0]]


def without_ours(params: dict[str, Any]) -> None:
    del params["pdkv"]


POLICIES = [("fail", Status.FINISHED_ERROR), ("recompute", Status.FINISHED_LENGTH_CAPPED)]


@pytest.mark.parametrize(("policy", "end"), POLICIES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_be_believed_is_the_policys(release, stack, ranks, policy, end):
    world = World(release, stack, ranks=ranks, policy=policy, kv_lease_duration=SOON_S)
    params = world.prefill()
    forged_blocks(params)
    request = world.decode(params)
    world.settle()
    assert request.status is end
    assert request.loads == 1


@pytest.mark.parametrize("local", [0, 12])
@pytest.mark.parametrize("forge", [forged_tokens, without_ours])
def test_no_forgery_is_believed(stack, forge, local):
    world = World(RELEASES[-1], stack, policy="recompute", kv_lease_duration=SOON_S)
    params = world.prefill()
    forge(params)
    request = world.decode(params, local_tokens=local)
    world.settle()
    assert request.status is Status.FINISHED_LENGTH_CAPPED
    assert request.loads == 1


def test_a_failed_load_keeps_what_was_there(release, stack):
    """Blocks from the consumer's own prefix cache are none of those that a failed load spoils."""
    world = World(release, stack, policy="recompute", kv_lease_duration=SOON_S)
    params = world.prefill()
    forged_blocks(params)
    request = world.decode(params, local_tokens=12)
    world.settle()
    assert request.status is Status.FINISHED_LENGTH_CAPPED


def test_another_prompts_parameters_are_refused(release, stack):
    world = World(release, stack, kv_lease_duration=SOON_S)
    request = world.decode(world.prefill(), [*PROMPT[:-1], 7])
    world.settle()
    assert request.status is Status.FINISHED_ERROR


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_aborted_request_leaves_nothing_behind(release, stack, steps):
    world = World(release, stack, kv_lease_duration=SOON_S)
    request = world.decode(world.prefill())
    for _ in range(steps):
        world.d.step()
    if not request.is_finished():
        world.d.abort(request)
    world.settle()


def test_a_request_aborted_at_the_producer_is_not_exported(release, stack):
    world = World(release, stack)
    request = world.p.submit(Request("r", PROMPT, {"do_remote_decode": True}, max_tokens=2))
    world.p.step()
    world.p.abort(request)
    world.settle()
    assert request.answer is None


def test_a_preempted_request_is_computed_anew(release, stack):
    world = World(release, stack)
    request = world.decode(world.prefill(), max_tokens=3)
    world.until(lambda: request.status is Status.RUNNING)
    world.d.preempt(request)
    world.settle()
    assert request.status is Status.FINISHED_LENGTH_CAPPED
    assert request.loads == 1


def test_an_id_is_used_again(release, stack):
    world = World(release, stack)
    for prompt in (PROMPT, PROMPT[::-1]):
        request = world.decode(world.prefill(prompt=prompt), prompt)
        world.settle()
        assert request.status is Status.FINISHED_LENGTH_CAPPED
        assert request.loads == 1


def test_children_of_one_request_share_what_was_prefilled(release, stack):
    """With `n` > 1 a request comes as several, on both sides, and any of the answers may be the client's."""
    world = World(release, stack)
    for _ in range(2):
        asks = {"do_remote_decode": True}
        prefilled = [world.p.submit(Request(f"{child}_r", PROMPT, dict(asks))) for child in range(2)]
        world.p.step()
        assert prefilled[0].answer == prefilled[1].answer
        leader, other = (
            world.d.submit(Request(f"{child}_d", PROMPT, copy.deepcopy(prefilled[1].answer), max_tokens=tokens))
            for child, tokens in enumerate((1 << 30, 1))
        )
        world.until(lambda: other.status is Status.FINISHED_LENGTH_CAPPED)  # noqa: B023 - called before the next turn
        assert (leader.status, leader.loads, other.loads) == (Status.RUNNING, 1, 0)
        world.d.abort(leader)
        world.settle()


def test_a_producer_that_lost_the_blocks_exports_nothing(release, stack):
    # Before 0.27 a request could be preempted, and finish all the same from a step that was in flight.
    world = World(release, stack)
    request = world.p.submit(Request("r", PROMPT, {"do_remote_decode": True}, max_tokens=2))
    world.p.step()
    world.p.preempt(request)
    request.num_computed_tokens = len(PROMPT)
    world.p.finish(request, Status.FINISHED_LENGTH_CAPPED)
    world.settle()
    assert request.answer is None


def test_an_embedded_prompt_is_neither_exported_nor_fetched(release, stack):
    world = World(release, stack, kv_lease_duration=SOON_S)
    embedded = world.p.submit(Request("r", PROMPT, {"do_remote_decode": True}, prompt_embeds=object()))
    world.p.step()
    assert embedded.answer is None
    request = world.decode(world.prefill("q"), prompt_embeds=object())
    world.settle()
    assert request.loads == 0


@pytest.mark.parametrize("aborts", [False, True])
def test_a_load_may_begin_later_or_never(stack, aborts):
    world = World("0.33.0", stack)
    world.d.defer_loads = True
    request = world.decode(world.prefill())
    for _ in range(3):
        world.d.step()
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    if aborts:
        world.d.abort(request)
    else:
        world.d.drain_deferred_loads()
    world.settle()
    assert request.status is (Status.FINISHED_ABORTED if aborts else Status.FINISHED_LENGTH_CAPPED)


def groups(release: str, stack: ExitStack, **options: Any) -> World | None:
    """A model with two KV groups, or `None` where the release can't report that a load of such a model failed."""
    if has(release, "0.30.0"):
        return World(release, stack, groups=2, **options)
    with pytest.raises(UnsupportedError, match="several KV groups"):
        World(release, stack, groups=2, **options)
    return None


def test_several_groups_are_fetched(release, stack):
    if (world := groups(release, stack)) is not None:
        request = world.decode(world.prefill())
        world.settle()
        assert request.status is Status.FINISHED_LENGTH_CAPPED
        assert request.loads == 1


@pytest.mark.parametrize(("policy", "end"), POLICIES)
def test_several_groups_fail_as_the_policy_says(release, stack, policy, end):
    if (world := groups(release, stack, policy=policy, kv_lease_duration=SOON_S)) is not None:
        params = world.prefill()
        forged_blocks(params)
        request = world.decode(params)
        world.settle()
        assert request.status is end


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_indexers_cache_goes_with_that_of_its_layers(release, stack, ranks):
    """Two caches of one KV group: what runs on only one of them would be found out."""
    world = World(release, stack, ranks=ranks, indexer=True)
    params = world.prefill()
    assert params["pdkv"]["version"] == 2
    assert [len(rank) for rank in params["pdkv"]["references"]] == [2] * ranks
    assert len(params["remote_block_ids"]) == len(params["pdkv"]["groups"]) == 1
    request = world.decode(params)
    world.settle()
    assert request.status is Status.FINISHED_LENGTH_CAPPED
    assert request.loads == 1


@pytest.mark.parametrize(("policy", "end"), POLICIES)
@pytest.mark.parametrize("at", [0, 1])
def test_a_load_without_one_of_its_caches_has_failed(release, stack, policy, end, at):
    world = World(release, stack, policy=policy, kv_lease_duration=SOON_S, indexer=True)
    params, other = world.prefill(), world.prefill("other", PROMPT[::-1])
    params["pdkv"]["references"][0][at] = other["pdkv"]["references"][0][at]
    request = world.decode(params)
    world.settle()
    assert request.status is end


@pytest.mark.parametrize("there", [True, False])
def test_an_indexer_at_one_end_only_is_refused(release, stack, there, caplog):
    world = World(release, stack, policy="recompute", kv_lease_duration=SOON_S, indexer=there)
    world.d = world.engine("kv_consumer", "other", policy="recompute", indexer=not there)
    with caplog.at_level("WARNING"):
        request = world.decode(world.prefill())
        world.settle()
    assert request.status is Status.FINISHED_LENGTH_CAPPED
    assert "the layers of a KV group are" in caplog.text


def test_engines_of_both_roles_serve_one_another(release, stack):
    world = World(release, stack)
    world.p, world.d = (world.engine("kv_both", f"both{number}") for number in range(2))
    for _ in range(2):
        request = world.decode(world.prefill())
        world.settle()
        assert request.status is Status.FINISHED_LENGTH_CAPPED
        assert request.loads == 1
        world.p, world.d = world.d, world.p


def test_an_older_release_is_refused(stack, monkeypatch):
    module = stack.enter_context(vllm(RELEASES[0], "cuda"))
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.23.1")
    with pytest.raises(UnsupportedError, match=r"`0\.24`"):
        Llm(RELEASES[0], module, "kv_producer", name="old")


def test_sleep_mode_is_refused(release, stack):
    module = stack.enter_context(vllm(release))
    with pytest.raises(PdkvError, match="enable_sleep_mode"):
        Llm(release, module, "kv_producer", name="sleepy", sleep_mode=True)
    assert module.PdkvConnector.supports_sleep_mode(None) is False


def test_scales_that_each_engine_makes_for_itself_are_refused(release, stack):
    module = stack.enter_context(vllm(release))
    config = engine_config("kv_producer", "p", 1, "fail", False, False, {})
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(PdkvError, match="calculate_kv_scales"):
        module.PdkvConnector(config, module.KVConnectorRole.WORKER, cache_config(1))


def test_traces_call_what_the_release_has(release):
    base = {**declared(release, "KVConnectorBase_V1"), **declared(release, "SupportsHMA")}
    for part in parts(release):
        for hook, positions in arity(release, part).items():
            assert takes(base[hook].signature, positions), (part, hook)


def test_traces_leave_out_no_hook_that_must_be_there(release):
    called = {hook for part in parts(release) for hook in arity(release, part)}
    assert abstract(release, "KVConnectorBase_V1") | abstract(release, "SupportsHMA") <= called


def test_a_hook_that_came_with_a_release_is_in_its_trace(release):
    """What the connector defines is called in the traces of just those releases in which vLLM calls it."""
    called = {hook for part in parts(release) for hook in arity(release, part)}
    calls = set(facts(release)["calls"])
    for hook in ("get_finished", "get_transfer_results", "get_loaded_kv_cache_group_ids", "on_new_request"):
        assert (hook in called) == (hook in calls), hook


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    before = {name for name in sys.modules if name.startswith("vllm")}
    yield
    assert {name for name in sys.modules if name.startswith("vllm")} == before
