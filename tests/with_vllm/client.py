"""Asks OpenAI servers for completions, whole or streamed, and reads their metrics. Knows nothing of who answers."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request

from with_vllm.answers import Answer, Choice

# A request is answered within seconds; one that takes longer than this hangs.
ANSWER_S = 600


class RefusedError(Exception):
    """The server answered with an error: its HTTP status and text."""

    def __init__(self, status, text):
        super().__init__(f"HTTP {status}: {text[:500]}")
        self.status = status
        self.text = text


class BrokenError(Exception):
    """The answer ended before its end."""


def post(url, body, timeout_s=ANSWER_S, headers=None):
    """Posts JSON and returns the JSON that comes back."""
    sent = {"Content-Type": "application/json"} | (headers or {})
    request = urllib.request.Request(url, json.dumps(body).encode(), sent)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except http.client.HTTPException as error:
        raise BrokenError(repr(error)) from error
    except urllib.error.HTTPError as error:
        with error:
            raise RefusedError(error.code, error.read().decode(errors="replace")) from None


def body(prompt, *, params=None, max_tokens=8, **fields):
    """A request to complete a text or token ids greedily and to answer with token ids and log-probabilities."""
    made = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    made |= {"logprobs": 1, "return_token_ids": True}
    if params is not None:
        made["kv_transfer_params"] = params
    return made | fields


def complete(url, prompt, *, headers=None, **fields):
    """A completion as an `Answer`. Raises `RefusedError` for any status but 200."""
    return _answer(post(f"{url}/v1/completions", body(prompt, **fields), headers=headers))


def _answer(found):
    choices = [
        Choice(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])
        for choice in found["choices"]
    ]
    return Answer(choices, found.get("kv_transfer_params"))


def chat(url, text, *, max_tokens=8, **fields):
    """A chat completion of one message: the tokens and their log-probabilities."""
    made = {"model": "model", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    made |= {"temperature": 0, "ignore_eos": True, "logprobs": True, "return_token_ids": True}
    found = post(f"{url}/v1/chat/completions", made | fields)
    [choice] = found["choices"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    return Answer([Choice(choice["token_ids"], logprobs, choice["finish_reason"])], found.get("kv_transfer_params"))


def stream(url, prompt, *, leave_after=None, **fields):
    """A streamed completion as an `Answer`; after `leave_after` events the client is gone and there is no answer."""
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=ANSWER_S)
    try:
        made = json.dumps(body(prompt, stream=True, **fields))
        connection.request("POST", "/v1/completions", made, {"Content-Type": "application/json"})
        if leave_after == 0:
            return None
        response = connection.getresponse()
        if response.status != 200:
            raise RefusedError(response.status, response.read().decode(errors="replace"))
        tokens, logprobs, finish = [], [], None
        for number, event in enumerate(_events(response), 1):
            if "error" in event:
                raise RefusedError(500, json.dumps(event))
            if leave_after is not None and number >= leave_after:
                return None
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
                logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
                finish = choice["finish_reason"] or finish
        if finish is None:
            raise BrokenError("no finish")
        return Answer([Choice(tokens, logprobs, finish)])
    except http.client.HTTPException as error:
        raise BrokenError(repr(error)) from error
    finally:
        connection.close()


def _events(response):
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if data and data != b"[DONE]":
            yield json.loads(data)


def metric(url, name):
    """The sum of a metric of the server over all of its labels; 0 where it has none of that name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_S) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))
