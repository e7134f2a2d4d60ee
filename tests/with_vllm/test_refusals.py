"""Parameters that a client forges, replays, swaps or edits: an error or a local prefill by policy, never other KV."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import pytest

from with_vllm.answers import same
from with_vllm.engines import Pair
from with_vllm.ports import free_port
from with_vllm.prompts import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

ASKED, OTHER = prompt(100, 1), prompt(100, 2)
BLOCKS = 300
# Short enough to wait for its end, in seconds; and what must be fetched in time has a long one.
LEASE_S, LONG_LEASE_S = 8, 1800


@dataclass
class World:
    """A pair of engines, the policy of the one that decodes, and the answer that `ASKED` must have."""

    pair: Pair
    policy: str
    reference: object

    def check(self, params, asked=ASKED):
        """Decodes with the parameters: refused, and then what the policy says."""
        computed = self.pair.decode.call("computed")
        found = self.pair.decode.ask(asked, params=params, max_tokens=8)
        if self.policy == "fail":
            assert (found.finish, found.tokens) == ("error", [])
        else:
            assert same(found, self.reference)
            assert self.pair.decode.call("computed") - computed == len(asked) + 7

    def hand_over_for_long(self):
        """Prefills `ASKED` for a decode that may be as slow as it likes."""
        for_leases = functools.partial(self.pair.prefill.call, "run", module="with_vllm.leases", function="last")
        for_leases(lease_s=LONG_LEASE_S)
        try:
            return self.pair.hand_over(ASKED)
        finally:
            for_leases(lease_s=LEASE_S)

    def reuse_blocks(self):
        """Has the prefilling engine write other prompts into all of its blocks."""
        for seed in range(BLOCKS // 30 + 1):
            self.pair.prefill.ask(prompt(30 * 32, 100 + seed))


@pytest.fixture(scope="module", params=["fail", "recompute"])
def world(logs, tiny, request):
    """Engines that have as many free blocks after all these tests as before, once every lease has ended."""
    # The one that decodes keeps nothing, so that whatever it answers with it has fetched or computed for this request.
    pair = Pair(
        f"refusals-{request.param}",
        logs,
        tiny,
        "pdkv",
        policy=request.param,
        extra={"kv_lease_duration": LEASE_S},
        num_gpu_blocks_override=BLOCKS,
        decode={"enable_prefix_caching": False},
    )
    reference = pair.decode.ask(ASKED)
    before = pair.free_blocks()
    yield World(pair, request.param, reference)
    pair.forget()
    assert pair.free_blocks() == before
    assert pair.close()


def test_nothing_wrong(world):
    computed = world.pair.decode.call("computed")
    params = world.hand_over_for_long()
    assert same(world.pair.decode.ask(ASKED, params=params, max_tokens=8), world.reference)
    assert world.pair.decode.call("computed") - computed == 8


def test_reference_that_was_used_before(world):
    params = world.hand_over_for_long()
    assert same(world.pair.decode.ask(ASKED, params=params), world.reference)
    world.check(params)


def test_reference_that_was_used_before_its_blocks_were_written_again(world):
    params = world.hand_over_for_long()
    assert same(world.pair.decode.ask(ASKED, params=params), world.reference)
    world.pair.prefill.wait_until_idle()
    world.reuse_blocks()
    world.check(params)


def test_reference_that_expired(world):
    params = world.pair.hand_over(ASKED)
    world.pair.prefill.wait_until_idle()
    world.reuse_blocks()
    world.check(params)


def test_reference_of_another_prompt(world):
    world.check(world.pair.hand_over(OTHER))


def test_reference_of_a_prompt_that_differs_in_one_token(world):
    world.check(world.pair.hand_over([*ASKED[:50], ASKED[50] + 1, *ASKED[51:]]))


def test_reference_of_a_longer_prompt(world):
    world.check(world.pair.hand_over(ASKED + OTHER))


def edited(change):
    """A change to parameters as a check of what is made of it."""

    def edit(params):
        params = copy.deepcopy(params)
        return change(params) or params

    return edit


def put(*path_and_value):
    """Puts a value at a path of keys and indices."""
    *path, last, value = path_and_value

    def change(params):
        for key in path:
            params = params[key]
        assert last == "new" or params[last] != value
        params[last] = value

    return edited(change)


def everywhere(key, name, value):
    """Puts the value at the top and into `pdkv`, so that they agree."""

    def change(params):
        params[key] = params["pdkv"][name] = value

    return edited(change)


def other_blocks(shift):
    """Names other blocks, at the top and in `pdkv`."""

    def change(params):
        params["remote_block_ids"] = [[block + shift for block in group] for group in params["remote_block_ids"]]
        for group in params["pdkv"]["groups"]:
            group["runs"] = [[first + shift, count] for first, count in group["runs"]]

    return edited(change)


def reference(key, change):
    """Changes a field of the first rank's reference."""

    def edit(params):
        fields = params["pdkv"]["references"][0][0]
        fields[key] = change(fields[key])

    return edited(edit)


EDITS = {
    "request id at the top": put("remote_request_id", "unknown"),
    "request id": everywhere("remote_request_id", "request_id", "unknown"),
    "engine id at the top": put("remote_engine_id", "unknown"),
    "engine id": everywhere("remote_engine_id", "engine_id", "unknown"),
    "tokens at the top": put("remote_num_tokens", 64),
    "tokens": everywhere("remote_num_tokens", "num_tokens", 99),
    "block ids at the top": put("remote_block_ids", [[1000000, 1000001, 1000002, 1000003]]),
    "block ids out of range": other_blocks(1000000),
    "block ids of somebody else": other_blocks(1),
    "first block": put("pdkv", "groups", 0, "first", 1),
    "tokens in a block": put("pdkv", "groups", 0, "block_tokens", 64),
    "no groups": put("pdkv", "groups", []),
    "no references": put("pdkv", "references", []),
    "version": put("pdkv", "version", 2),
    "no pdkv": put("pdkv", None),
    "text for pdkv": put("pdkv", "pdkv"),
    "list for pdkv": put("pdkv", [1, 2, 3]),
    "nobody there": lambda params: put("remote_port", free_port())(params),
    "no port": put("remote_port", -1),
    "host": put("remote_host", 7),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_parameters(world, edit):
    world.check(EDITS[edit](world.pair.hand_over(ASKED)))


def _other(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    if isinstance(value, list):
        return value[:-1]
    return {} if value else None


def test_every_field_of_a_reference(world):
    fields = world.pair.hand_over(ASKED)["pdkv"]["references"][0][0]
    assert len(fields) > 5
    for key in fields:
        params = world.pair.hand_over(ASKED)
        value = params["pdkv"]["references"][0][0][key]
        world.check(reference(key, _other)(params))
        del params["pdkv"]["references"][0][0][key]
        world.check(params)
        assert _other(value) != value, key
