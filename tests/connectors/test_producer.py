"""What a producer exports, and what it answers."""

from __future__ import annotations

import json

from connectors.tickets import BLOCK_TOKENS, answer, export, read
from pdkv.connectors.core.producer import Producer, parent_of


def producer(groups=1):
    return Producer("engine-p", [BLOCK_TOKENS] * groups, 30.0)


def test_the_order_names_the_blocks_of_the_answer():
    p = producer(2)
    delay, params = export(blocks=([0, 0, 7, 8, 9, 10], [1, 2, 3, 4, 5]), producer=p)
    assert delay
    (order,) = p.take()
    assert order.block_ids == ((7, 8, 9), (1, 2, 3, 4, 5))
    assert [list(map(json.loads, rank)) for rank in order.references] == params["pdkv"]["references"]
    assert [reference["num_blocks"] for reference in params["pdkv"]["references"][0]] == [3, 5]
    assert [reference["num_tokens"] for reference in params["pdkv"]["references"][0]] == [38, 70]
    assert (order.request_id, order.lease_s, p.take()) == ("p-1", 30.0, ())


def test_a_prompt_shorter_than_a_block_is_one_block():
    ticket, _ = read(answer(blocks=([4],), tokens=range(3)), 3)
    assert (ticket.num_tokens, ticket.groups[0].runs) == (3, ((4, 1),))


def test_the_digest_of_every_reference_covers_prompt_and_answer():
    ticket, _ = read(answer(ranks=3), 70, ranks=3)
    other, _ = read(answer(request_id="p-2"), 70)
    digests = {json.loads(text)["digest"] for rank in ticket.references for text in rank}
    assert len(digests) == 1
    assert digests.pop().endswith(ticket.seal().hex())
    assert ticket.seal() != other.seal()


def test_there_is_nothing_to_export_without_blocks():
    for blocks, tokens in (
        (([],), range(70)),
        (([1, 2],), range(70)),
        (([1, 0, 3, 4, 5],), range(70)),
        (([],), range(0)),
    ):
        p = producer()
        assert export(blocks=blocks, tokens=tokens, producer=p) == (False, None)
        assert (p.alive, p.take()) == (0, ())


def test_a_window_that_left_every_block_behind_exports_none_of_that_group():
    p = producer(2)
    _, params = export(blocks=([0] * 5, range(1, 6)), producer=p)
    assert params["pdkv"]["groups"][0] == {"first": 5, "block_tokens": BLOCK_TOKENS, "runs": []}


def test_children_share_the_export_of_the_first_that_finishes():
    p = producer()
    delay, params = export("1_parent", producer=p)
    again, same = export("0_parent", producer=p)
    assert (delay, again, same) == (True, False, params)
    params["remote_prefill_cached_tokens"] = 3  # as vLLM does with what it gets
    assert export("2_parent", producer=p) == (False, same)
    assert [order.request_id for order in p.take()] == ["1_parent"]
    p.ended(["1_parent"])
    assert export("3_parent", producer=p)[0]


def test_namesakes_with_another_prompt_do_not_share():
    p = producer()
    export("0_parent", producer=p)
    delay, params = export("1_parent", tokens=range(1, 71), producer=p)
    assert delay
    assert params["remote_request_id"] == "1_parent"


def test_an_id_that_is_still_exported_is_not_exported_again():
    p = producer()
    assert export(producer=p)[0]
    assert export(producer=p) == (False, None)
    p.ended(["p-1"])
    assert export(producer=p)[0]
    assert p.alive == 1


def test_who_is_whose_child():
    assert parent_of("0_cmpl-1-abc") == "cmpl-1-abc"
    assert parent_of("12_0_x") == "0_x"
    assert parent_of("cmpl_0") is None
