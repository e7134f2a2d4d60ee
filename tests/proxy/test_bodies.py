"""Bodies and streams, without any socket."""

from __future__ import annotations

import itertools
import json

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
        b'{"a": 1e999}',
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
