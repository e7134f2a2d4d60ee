"""What stands in `kv_transfer_params`: written as consumers of NIXL expect it, read as if a stranger wrote it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.tickets import answer, changed, read
from pdkv.connectors.core.digest import signing_key
from pdkv.connectors.core.params import asks_for_decode, asks_for_prefill, expand, runs_of
from pdkv.connectors.core.producer import Producer
from pdkv.errors import LayoutError, PdkvError, ReferenceDigestError, ReferenceForgedError, UnsupportedError

NIXL_KEYS = {
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
}
ROUTER_ASKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def test_an_answer_has_the_keys_of_nixl_and_one_more():
    params = answer()
    assert set(params) == NIXL_KEYS | {"pdkv"}
    assert params["remote_block_ids"] == [[1, 2, 3, 4, 5]]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["transfer_mode"], params["remote_num_tokens"]) == ("pull", 70)


def test_an_answer_is_read_as_it_was_written():
    ticket, producer = read(answer(blocks=([0, 0, 3, 4, 9], range(1, 6)), ranks=2), 71, groups=2, ranks=2)
    assert (producer.engine_id, producer.host, producer.port) == ("engine-p", "127.0.0.1", 5600)
    assert [(group.first, group.runs) for group in ticket.groups] == [(2, ((3, 2), (9, 1))), (0, ((1, 5),))]
    places = [[(json.loads(text)["rank"], json.loads(text)["group"]) for text in rank] for rank in ticket.references]
    assert places == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


@given(st.lists(st.integers(0, 50), max_size=60))
def test_runs_are_what_they_stand_for(blocks):
    runs = runs_of(blocks)
    assert expand(runs) == blocks
    assert len(runs) == sum(b != a + 1 for a, b in zip([None, *blocks], blocks, strict=False) if a is not None) + bool(
        blocks
    )


def test_other_keys_are_tolerated_and_may_be_missing():
    params = answer() | {"remote_prefill_cached_tokens": 3, "transfer_id": "x", "tp_size": None}
    for key in ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_num_tokens", "dcp_size"):
        del params[key]
    read(params, 70)
    read(params | {"remote_port": "5600"}, 70)


@pytest.mark.parametrize(
    "params", [None, {}, ROUTER_ASKS, {"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_host": None}]
)
def test_missing_parameters_ask_for_nothing(params):
    assert not asks_for_prefill(params)


def test_what_asks_for_what():
    assert asks_for_decode(ROUTER_ASKS)
    assert not asks_for_decode({"do_remote_decode": "false"})
    assert asks_for_prefill(answer())
    assert not asks_for_decode(answer())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["remote_block_ids"], [[1, 2, 3, 4, 6]]),
        (["remote_block_ids"], []),
        (["remote_block_ids"], "1"),
        (["remote_engine_id"], "engine-q"),
        (["remote_request_id"], "p-2"),
        (["remote_num_tokens"], 69),
        (["tp_size"], 2),
        (["pp_size"], 2),
        (["dcp_size"], 2),
        (["transfer_mode"], "push"),
        (["pdkv", "tp_size"], 0),
        (["remote_host"], 1),
        (["remote_host"], None),
        (["remote_engine_id"], "engine-p\nforged line"),
        (["remote_engine_id"], ["x" * 5_000]),
        (["remote_num_tokens"], 70.0),
        (["tp_size"], True),
        (["remote_port"], 0),
        (["remote_port"], None),
        (["remote_port"], True),
        (["pdkv"], 1),
        (["pdkv"], []),
        (["pdkv", "engine_id"], None),
        (["pdkv", "num_tokens"], 0),
        (["pdkv", "num_tokens"], 1.5),
        (["pdkv", "groups"], {}),
        (["pdkv", "groups", 0], None),
        (["pdkv", "groups", 0, "first"], 1),
        (["pdkv", "groups", 0, "block_tokens"], 0),
        (["pdkv", "groups", 0, "runs"], [[1, 2**31]]),
        (["pdkv", "groups", 0, "runs"], [[1, 5, 6]][:0]),
        (["pdkv", "groups", 0, "runs", 0], [-1, 5]),
        (["pdkv", "groups", 0, "runs", 0], [1]),
        (["pdkv", "references"], []),
        (["pdkv", "references"], [[]]),
        (["pdkv", "references", 0], []),
        (["pdkv", "references"], [[{}] * 2]),
        (["pdkv", "references", 0, 0], {"tag": "x" * 5_000}),
        (["pdkv", "references", 0, 0], {"tag": {"deep": 1}}),
        (["pdkv", "references", 0, 0], {str(name): 1 for name in range(100)}),
        (["pdkv", "references", 0, 0], {"tag": 10**5_000}),
        (["pdkv", "references", 0, 0], "text"),
    ],
)
def test_what_no_producer_would_write_is_refused(path, value):
    with pytest.raises(ReferenceForgedError) as refused:
        read(changed(answer(), path, value), 70)
    assert refused.value.hint
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 400


def test_a_later_format_and_another_connector_are_told_apart():
    with pytest.raises(UnsupportedError, match="format `3`"):
        read(changed(answer(), ["pdkv", "version"], 3), 70)
    params = answer()
    del params["pdkv"]
    with pytest.raises(UnsupportedError, match="engine-p"):
        read(params, 70)


SPLIT = {"blocks": ([0, 0, 3, 4, 9], range(1, 6)), "caches": (0, 0, 1)}


def test_a_group_of_several_caches_has_a_reference_for_each():
    params = answer(**SPLIT)
    assert params["pdkv"]["version"] == 2
    assert [(entry["group"], entry["num_blocks"]) for entry in params["pdkv"]["references"][0]] == [
        (0, 3),
        (1, 3),
        (2, 5),
    ]
    ticket, _ = read(params, 70, groups=2, caches=[3])
    assert (ticket.version, len(ticket.references[0]), len(ticket.groups)) == (2, 3, 2)
    assert ticket.seal() != replace(ticket, version=1).seal()


@pytest.mark.parametrize(
    ("theirs", "ours", "what"),
    [
        (SPLIT, {"groups": 2}, "are alike here and of several shapes or types there"),
        ({"blocks": SPLIT["blocks"]}, {"groups": 2, "caches": [3]}, "are of several shapes or types here and alike"),
        (SPLIT, {"groups": 2, "caches": [4]}, r"`\[4\]` caches here and `\[3\]` there"),
    ],
)
def test_other_caches_are_named_with_both(theirs, ours, what):
    with pytest.raises(LayoutError, match=what):
        read(answer(**theirs), 70, **ours)


@pytest.mark.parametrize("version", [1, 2.0, True, "2", None])
def test_a_format_that_was_edited_is_refused(version):
    with pytest.raises(PdkvError):
        read(changed(answer(**SPLIT), ["pdkv", "version"], version), 70, groups=2, caches=[3])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"ranks": 2}, {"ranks": 1}),
        ({"blocks": (range(1, 6), range(1, 6))}, {"groups": 1}),
    ],
    ids=["ranks", "groups"],
)
def test_an_engine_of_other_sizes_is_named_with_both(theirs, ours):
    with pytest.raises(LayoutError, match=r"`1` here and `2` there|`2` KV groups, this engine `1`"):
        read(answer(**theirs), 70, **ours)


def test_another_block_size_is_named_with_both():
    with pytest.raises(LayoutError, match="hold `32` tokens, this engine's `16`"):
        read(changed(answer(), ["pdkv", "groups", 0, "block_tokens"], 32), 70)


class Counted(list):
    """A list that tells how much of it was looked at."""

    looked = 0

    def __iter__(self):
        for item in super().__iter__():
            Counted.looked += 1
            yield item


@pytest.mark.parametrize("path", [["pdkv", "groups"], ["pdkv", "groups", 0, "runs"], ["remote_block_ids", 0]])
def test_reading_costs_no_more_than_what_an_honest_answer_would(path):
    """Lists of other lengths are refused by their length."""
    Counted.looked = 0
    filler = {"first": 0, "block_tokens": 16, "runs": [[1, 5]]} if path[-1] == "groups" else [1, 1]
    with pytest.raises(PdkvError):
        read(changed(answer(), path, Counted([filler] * 10_000)), 70)
    assert Counted.looked == 0


KEY = signing_key(b"a secret of the cluster")


def test_with_a_secret_only_what_was_signed_with_it_is_read():
    producer = Producer("engine-p", [16], 30.0, KEY)
    signed = answer(producer=producer)
    assert read(signed, 70, key=KEY)[0].num_tokens == 70
    assert read(signed, 70)[0].num_tokens == 70
    for params in (
        answer(),
        answer(producer=Producer("engine-p", [16], 30.0, signing_key(b"another secret here"))),
        changed(signed, ["remote_host"], "127.0.0.2"),
        changed(signed, ["remote_port"], 5601),
        changed(signed, ["pdkv", "signature"], None),
        changed(signed, ["pdkv", "signature"], "\u00e4" * 64),
        changed(signed, ["pdkv", "references", 0, 0, "number"], 7),
    ):
        with pytest.raises(ReferenceForgedError, match="secret"):
            read(params, 70, key=KEY)


def test_a_prompt_that_is_shorter_than_the_export_is_another():
    with pytest.raises(ReferenceDigestError, match=r"`70`.*`69`"):
        read(answer(), 69)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(st.data(), JSON)
def test_no_value_anywhere_does_worse_than_a_refusal(data, value):
    params = answer()
    path, at = [], params
    while isinstance(at, dict | list) and at and (not path or data.draw(st.booleans())):
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        path.append(key)
        at = at[key]
    with contextlib.suppress(PdkvError):
        read(changed(params, path, value), 70)
