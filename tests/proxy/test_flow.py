"""What each leg is sent, and what the client gets, while nothing fails."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from pdkv.proxy import bodies
from proxy.engine import KEYS, expected
from proxy.world import PATIENCE_S, events, run, spoken, until, world

PROMPT = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 5, "temperature": 0.5, "seed": 7}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 5}
NULLS = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, **NULLS}


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_prompt_is_prefilled_in_one_place_and_decoded_in_another(chat, stream):
    async def main():
        async with world() as w:
            body = (CHAT if chat else PROMPT) | ({"stream": True, "stream_options": {"x": 1}} if stream else {})
            status, answer, _ = await w.ask(body, chat=chat)
            assert status == 200
            if stream:
                assert events(answer)[-1] == "[DONE]"
                assert spoken(events(answer)) == expected(body)
            else:
                choice = answer["choices"][0]
                assert (choice["message"]["content"] if chat else choice["text"]) == expected(body)
            plain = {name: value for name, value in body.items() if name != "stream_options"}
            assert w.prefill[0].bodies == [plain | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASKED}]
            [sent] = w.decode[0].bodies
            params = sent.pop("kv_transfer_params")
            assert sent == body
            assert params.items() >= KEYS.items()
            assert params["pdkv"]["version"] == 1
            path = "/v1/chat/completions" if chat else "/v1/completions"
            assert {seen.path for seen in w.prefill[0].seen + w.decode[0].seen} == {path}

    run(main)


def test_prefill_makes_one_token_whatever_the_client_wants():
    async def main():
        async with world() as w:
            wants = {"n": 3, "min_tokens": 4, "max_completion_tokens": 9, "best_of": 4, "stop": ["x"], "logprobs": 2}
            status, answer, _ = await w.ask(PROMPT | wants)
            assert status == 200
            assert len(answer["choices"]) == 3
            [sent] = w.prefill[0].bodies
            assert sent == PROMPT | {
                "n": 1,
                "max_tokens": 1,
                "max_completion_tokens": 1,
                "stop": ["x"],
                "logprobs": 2,
                "stream": False,
                "kv_transfer_params": ASKED,
            }
            assert w.decode[0].bodies[0].items() >= (PROMPT | wants).items()

    run(main)


def test_client_cannot_say_where_kv_comes_from():
    async def main():
        async with world() as w:
            forged = KEYS | {"pdkv": {"reference": "somebody else's"}}
            inner = {"kv_transfer_params": "forged", "ec_transfer_params": "forged", "kept": 1}
            told = {"kv_transfer_params": forged, "ec_transfer_params": forged, "vllm_xargs": inner}
            status, answer, _ = await w.ask(PROMPT | told)
            assert (status, answer["choices"][0]["text"]) == (200, expected(PROMPT))
            assert w.prefill[0].bodies[0]["kv_transfer_params"] == ASKED
            for sent in w.prefill[0].bodies + w.decode[0].bodies:
                assert sent["vllm_xargs"] == {"kept": 1}
                assert "ec_transfer_params" not in sent
            # Alone at a decode instance it has none at all.
            await w.ask(PROMPT | told | {"use_beam_search": True})
            assert "kv_transfer_params" not in w.decode[0].bodies[1]

    run(main)


@pytest.mark.parametrize("params", [None, {}], ids=["null", "empty"])
def test_decode_prefills_itself_where_prefill_offers_nothing(params):
    async def main():
        async with world() as w:
            w.prefill[0].params = params
            status, answer, _ = await w.ask(PROMPT)
            assert (status, answer["choices"][0]["text"]) == (200, expected(PROMPT))
            assert w.decode[0].bodies == [PROMPT]

    run(main)


ALONE = {
    "several_prompts": [{"prompt": ["one", "two"]}, {"prompt": [[1, 2], [3]]}, {"prompt": []}, {"prompt": [1, "x"]}],
    "prompt_logprobs": [{"prompt_logprobs": 0}, {"prompt_logprobs": 2}, {"echo": True, "logprobs": 0}],
    "beam_search": [{"use_beam_search": True, "n": 2}],
    "truncation": [{"truncate_prompt_tokens": -1}],
    "prompt_embeds": [{"prompt_embeds": "AAAA"}],
}


@pytest.mark.parametrize(("reason", "extra"), [(why, extra) for why, extras in ALONE.items() for extra in extras])
def test_what_two_instances_would_answer_differently_goes_to_one(reason, extra):
    async def main():
        async with world() as w:
            status, _, _ = await w.ask(PROMPT | extra)
            assert status == 200
            assert w.prefill[0].seen == []
            assert w.decode[0].bodies == [PROMPT | extra]
            assert (await w.counts())[f'pdkv_proxy_decode_only_total{{reason="{reason}"}}'] == 1

    run(main)


@pytest.mark.parametrize("prompt", [["one"], [[1, 2, 3]], [1, 2, 3]], ids=["text", "ids", "bare ids"])
def test_a_list_that_holds_one_prompt_is_split(prompt):
    async def main():
        async with world() as w:
            status, answer, _ = await w.ask(PROMPT | {"prompt": prompt, "echo": True})
            assert (status, answer["choices"][0]["text"]) == (200, expected({"prompt": prompt, "max_tokens": 5}))
            assert len(w.prefill[0].seen) == 1

    run(main)


@pytest.mark.parametrize(
    ("body", "split"),
    [
        ({"prompt": list(range(9))}, False),
        ({"prompt": list(range(10))}, True),
        ({"prompt": "x" * 36}, False),
        ({"prompt": "x" * 37}, True),
        ({"messages": [{"role": "u", "content": "x" * 35}]}, False),
        ({"messages": [{"role": "u", "content": "x" * 36}]}, True),
        ({"messages": [{"role": "u", "content": [{"type": "text", "text": "x" * 32}]}]}, True),
    ],
)
def test_short_prompts_skip_prefill(body, split):
    async def main():
        async with world(skip_prefill_below_tokens=10) as w:
            status, _, _ = await w.ask(body, chat="messages" in body)
            assert status == 200
            assert len(w.prefill[0].seen) == split
            assert ("kv_transfer_params" in w.decode[0].bodies[0]) == split
            assert (await w.counts()).get('pdkv_proxy_decode_only_total{reason="short"}', 0) == (not split)

    run(main)


def test_both_legs_carry_the_client_s_id_its_authorization_and_its_trace():
    async def main():
        async with world() as w:
            told = {"X-Request-Id": "mine", "Authorization": "Bearer s", "Traceparent": "00-a-b-01", "Cookie": "c"}
            _, _, headers = await w.ask(PROMPT, **told)
            assert headers["X-Request-Id"] == "mine"
            for leg in w.prefill[0].seen + w.decode[0].seen:
                assert {name: leg.headers[name] for name in told if name != "Cookie"}.items() <= told.items()
                assert "Cookie" not in leg.headers

    run(main)


def test_a_request_without_an_id_gets_one_for_both_legs():
    async def main():
        async with world() as w:
            ids = []
            for _ in range(2):
                _, _, headers = await w.ask(PROMPT | {"stream": True})
                ids.append(headers["X-Request-Id"])
            assert len(set(ids)) == 2
            assert [seen.headers["X-Request-Id"] for seen in w.prefill[0].seen] == ids
            assert [seen.headers["X-Request-Id"] for seen in w.decode[0].seen] == ids
            assert "Authorization" not in w.decode[0].seen[0].headers

    run(main)


def test_a_stream_is_passed_on_as_it_comes():
    async def main():
        async with world() as w:
            w.decode[0].gate, w.decode[0].words_first = asyncio.Event(), 2
            async with w.client.post(w.url + "/v1/completions", json=PROMPT | {"stream": True}) as response:
                assert response.content_type == "text/event-stream"
                first = await response.content.readuntil(b"\n\n") + await response.content.readuntil(b"\n\n")
                assert len(events(first.decode())) == 2  # while the engine still waits for its gate
                w.decode[0].gate.set()
                rest = (await response.content.read()).decode()
            assert spoken(events(first.decode() + rest)) == expected(PROMPT)

    run(main)


def test_unusual_json_arrives_as_it_was():
    async def main():
        async with world() as w:
            body = PROMPT | {"prompt": "\U0001f600 \ud800 \u0000", "temperature": 1e-7, "seed": 2**63, "user": None}
            raw = json.dumps(body)
            async with w.client.post(
                w.url + "/v1/completions", data=raw, headers={"Content-Type": "application/json; charset=utf-8"}
            ) as response:
                assert response.status == 200
            sent = dict(w.decode[0].bodies[0])
            del sent["kv_transfer_params"]
            assert sent == body

    run(main)


@pytest.mark.parametrize(("size", "beside"), [(100_000, True), (1000, False)], ids=["large", "small"])
def test_others_are_served_while_a_large_body_is_read(size, beside, monkeypatch):
    reading, go_on, threads = threading.Event(), threading.Event(), []
    read = bodies.read

    def slow(raw, *, chat):
        threads.append(threading.current_thread())
        reading.set()
        if beside:
            assert go_on.wait(PATIENCE_S)  # on the loop this would hold it, and `go_on` would never come
        return read(raw, chat=chat)

    async def main():
        async with world() as w:
            body = PROMPT | {"prompt": "x" * size}
            monkeypatch.setattr(bodies, "read", slow)
            asking = asyncio.create_task(w.ask(body))
            await until(reading.is_set)
            if beside:
                assert (await w.get("/health"))[0] == 200
                assert not asking.done()
                go_on.set()
            status, answer, _ = await asking
            assert (status, answer["choices"][0]["text"]) == (200, expected(body))
            assert [thread is not threading.main_thread() for thread in threads] == [beside]

    run(main)


def test_a_large_body_that_is_no_json_is_refused_too():
    async def main():
        async with world() as w:
            headers = {"Content-Type": "application/json"}
            async with w.client.post(
                w.url + "/v1/completions", data=b"{" + b" " * 100_000, headers=headers
            ) as response:
                assert response.status == 400
            assert w.prefill[0].seen == []

    run(main)
