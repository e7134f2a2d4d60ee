"""Bodies and streams, without any socket."""

from __future__ import annotations

import collections
import itertools
import json
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdkv.proxy import bodies, sse
from pdkv.proxy.answers import FailedError, error


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1,}',
        b'{"a": 1 "b": 2}',
        b'{"a" 1}',
        b"{a: 1}",
        b"{,}",
        b'{"a": 1',
        b'{"a":',
        b'{"a',
        b'{"a": 1}}',
        b'{"a": 1} x',
        b"{1: 1}",
        b'{"vllm_xargs": {"kv_transfer_params": 1, "a": 1e999}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_json_object_is_refused(raw):
    with pytest.raises(FailedError) as failure:
        bodies.read(raw, chat=False)
    assert failure.value.answer.status == 400
    assert json.loads(failure.value.answer.body)["error"]["code"] == 400


@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ('[{"a":', "}]")], ids=["objects", "lists"])
def test_a_body_that_is_nested_too_deeply_is_refused(opening, closing):
    def nested(levels):
        return f'{{"prompt": {opening * levels}1{closing * levels}}}'.encode()

    assert bodies.for_prefill(bodies.read(nested(90), chat=False))
    for levels in (250, 500, 1000, 100_000):
        with pytest.raises(FailedError) as failure:
            bodies.read(nested(levels), chat=False)
        assert failure.value.answer.status == 400


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("", 0),
        ("abc", 1),
        ("abcd", 1),
        ("abcde", 2),
        ([5, 6, 7], 3),
        ([[5, 6], [7]], 3),
        (["abcd", "abcd"], 2),
        (None, 0),
    ],
)
def test_length_of_a_prompt(prompt, tokens):
    assert bodies.read(json.dumps({"prompt": prompt}).encode(), chat=False).prompt_tokens == tokens


def test_length_of_a_chat_counts_tools():
    said = {"messages": [{"role": "user", "content": "abcd"}], "tools": [{"name": "abcd"}], "user": "x" * 1000}
    assert bodies.read(json.dumps(said).encode(), chat=True).prompt_tokens == 3


def written(raw):
    """What both legs are sent, of what a client wrote."""
    ask = bodies.read(raw, chat=False)
    return bodies.for_prefill(ask), bodies.for_decode(ask, {"k": 1})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=10,
)


# `n` and `best_of` are not said to the prefill leg as the client said them.
NAMES = st.text(max_size=9).filter(lambda name: name not in ("n", "best_of"))


@given(st.dictionaries(NAMES, JSON, max_size=6), st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_both_legs_say_what_the_client_said(body, ascii_only, indent):
    raw = b" \n" + json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass") + b"\r\n\t"
    prefill, decode = (json.loads(leg) for leg in written(raw))
    assert decode == body | {"kv_transfer_params": {"k": 1}}
    told = {"max_tokens": 1, "stream": False}
    assert {name: value for name, value in prefill.items() if name != "kv_transfer_params"} == body | told


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-le"])
def test_every_encoding_of_json_is_read(encoding):
    for leg in written('{"prompt": "\u00e4\U0001f600"}'.encode(encoding)):
        assert json.loads(leg)["prompt"] == "\u00e4\U0001f600"


def test_fields_are_passed_on_in_the_client_s_own_writing():
    for leg in written(rb'{"prompt": [1,  2],"x" :1e999, "text": "\ud800\/", "seed": 18446744073709551616.50}'):
        for part in (rb"[1,  2]", b"1e999", rb'"\ud800\/"', b"18446744073709551616.50"):
            assert part in leg


def test_of_a_name_that_comes_twice_the_last_counts_and_the_other_is_dropped():
    raw = b'{"prompt": "dropped", "kv_transfer_params": {"a": 1}, "prompt": [1, 2], "kv_transfer_params": {"b": 2}}'
    ask = bodies.read(raw, chat=False)
    assert (ask.fields, ask.prompt_tokens) == ({"prompt": b"[1, 2]"}, 2)


def test_a_body_of_too_many_fields_is_refused():
    def of(count):
        return json.dumps({f"f{at}": at for at in range(count)}).encode()

    assert len(bodies.read(of(1000), chat=False).fields) == 1000
    with pytest.raises(FailedError) as failure:
        bodies.read(of(1001), chat=False)
    assert b"1000" in failure.value.answer.body


@pytest.mark.parametrize("one", [12345, "word", None, 1.5], ids=["ids", "texts", "nulls", "floats"])
@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_the_work_in_python_does_not_grow_with_the_prompt(one, chat):
    def work(count):
        """Calls and lines of Python that a prompt of so many elements costs."""
        raw = json.dumps({"messages" if chat else "prompt": [one] * count}).encode()
        events = collections.Counter()

        def trace(_frame, event, _argument):
            events[event] += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            ask = bodies.read(raw, chat=chat)
            bodies.for_prefill(ask)
            bodies.for_decode(ask, {"k": 1})
        finally:
            sys.settrace(before)
        return events

    few, many = work(10), work(10_000)
    assert few["line"] > 0
    assert sum((many - few).values()) < 100


def test_true_is_no_token():
    assert bodies.read(b'{"prompt": [true, 1]}', chat=False).alone == "several_prompts"


EVENTS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n")).map("x".__add__), max_size=6)


@example(["x"], "\n\n", list(range(40)), 0)
@example(["x"], "\r\n\r\n", list(range(40)), 0)
@given(EVENTS, st.sampled_from(["\n\n", "\r\n\r\n"]), st.lists(st.integers(0, 400)), st.integers(0, 8))
def test_events_are_cut_where_they_end(texts, boundary, cuts, left):
    events = [f"data: {text}{boundary}".encode() for text in texts] + [f"data: [DONE]{boundary}".encode()]
    stream = b"".join(events)
    whole = stream[: len(stream) - left]
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    ends = {sum(map(len, events[:n])) for n in range(len(events) + 1)}
    cutter, given_out = sse.Events(), b""
    for start, end in itertools.pairwise(places):
        given_out += cutter.feed(whole[start:end])
        assert given_out == whole[: max(place for place in ends if place <= end)]  # no less: nothing waits for more
    assert cutter.complete == (left == 0)


@pytest.mark.parametrize("rest", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n"])
def test_a_last_event_without_its_empty_line_still_completes(rest):
    cutter = sse.Events()
    assert cutter.feed(b"data: {}\n\n" + rest) == b"data: {}\n\n"
    assert cutter.flush() == rest
    assert cutter.complete


@pytest.mark.parametrize("rest", [b'data: {"text": "[DONE]"}\n\n', b": data: [DONE]\n\n", b"data: [DONE]x\n\n"])
def test_only_the_event_itself_completes_a_stream(rest):
    cutter = sse.Events()
    assert cutter.feed(rest) == rest
    assert not cutter.complete


def test_half_an_event_is_dropped():
    cutter = sse.Events()
    assert cutter.feed(b'data: {"a') == b""
    assert cutter.flush() == b""


def test_an_error_event_is_one_event_with_openais_error():
    event = sse.error_event(error(502, "two\nlines"))
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event.removeprefix(b"data: "))["error"] == {
        "message": "two\nlines",
        "type": "BadGatewayError",
        "param": None,
        "code": 502,
    }
