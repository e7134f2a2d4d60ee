"""How much later the first token comes when another server has prefilled: real servers of vLLM, asked over HTTP.

Each set-up has two servers, and one without a connector does both phases. They are asked in turns: a round is a few
requests of each, and the servers of the others are stopped (`SIGSTOP`) meanwhile, or those whose threads poll would
take the CPUs from all. Whoever asks is the router: it sends the prompt to the one server and what that answers to the
other.

For each prompt of a set-up, in this order, and every time from before the request is sent:

- `prefill`: whole answer of the producer that prefills, with parameters.
- `load`: first token of the consumer that loads, with what the producer answered.
- `local`: first token of the consumer, asked again without parameters. All but the last token is in its prefix cache,
  as it was after the load: it computes one token both times.
- `answer`: whole answer of the producer, asked again without parameters, from its prefix cache.
- `export`: the same with parameters: what it costs to export, without the prefill's noise.

The hand-over is `(load - local) + (export - answer)`. Knows no connector but by name.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_setups import Setup

from with_vllm import client
from with_vllm.answers import Answer, Choice, same
from with_vllm.engines import ASK
from with_vllm.servers import Server

Times = dict[str, float]

# Tokens of an answer; all are compared with those of the server without a connector.
_ANSWER_TOKENS = 4
# A pair that was stopped may fail to find each other again at once: NIXL's handshake waits for five seconds.
_WARM_UPS = 5
_ALONE = "alone"


def prompts(number: int, tokens: int, seed: int) -> list[list[int]]:
    """So many prompts that share nothing, of token ids that every model of `with_vllm.models` has."""
    dice = random.Random(seed)
    return [dice.choices(range(2, 400), k=tokens) for _ in range(number)]


class AnswerError(RuntimeError):
    """A server answered with an error."""


class Fleet:
    """The servers of all set-ups, of which only those run that are asked."""

    def __init__(self, folder: Path, model: Path, setups: Sequence[Setup], arguments: Sequence[str]) -> None:
        self._servers: dict[str, dict[str, Server]] = {}
        self._running: str | None = None
        try:
            for setup in setups:
                self._start(setup.name)
                for role in ("producer", "consumer"):
                    self._servers[setup.name][role] = Server(
                        f"{setup.name}-{role}",
                        folder,
                        model,
                        transfer=setup.transfer(role),
                        environment=setup.environment,
                        arguments=arguments,
                    )
                self._wait()
            self._start(_ALONE)
            self._servers[_ALONE]["both"] = Server(_ALONE, folder, model, arguments=arguments)
            self._wait()
        except BaseException:
            self.close()
            raise

    def _start(self, name: str) -> None:
        self._let(signal.SIGSTOP)
        self._running, self._servers[name] = name, {}

    def _wait(self) -> None:
        for server in self._servers[self._running or ""].values():
            server.wait()

    def _let(self, what: signal.Signals) -> None:
        for server in self._servers.get(self._running or "", {}).values():
            os.killpg(server.process.pid, what)

    @contextmanager
    def only(self, name: str) -> Iterator[dict[str, Server]]:
        """Lets the servers of one set-up run, until another's are to."""
        if name != self._running:
            self._let(signal.SIGSTOP)
            self._running = name
            self._let(signal.SIGCONT)
        yield self._servers[name]

    def close(self) -> None:
        """Ends all servers."""
        for servers in self._servers.values():
            for server in servers.values():
                server.kill()


class Asker:
    """Sends requests to one server and takes the time."""

    def __init__(self, server: Server) -> None:
        self._host = server.url.removeprefix("http://")

    def first(
        self, prompt: Sequence[int], params: dict[str, Any] | None = None, name: str | None = None
    ) -> tuple[float, Answer]:
        """Seconds from before the request is sent until the first token is there, and the answer.

        The server's id of the request has `name` in it, if there is one.
        """
        body = client.body(prompt, params=params, max_tokens=_ANSWER_TOKENS, stream=True)
        took, tokens, logprobs, finish = None, [], [], None
        with self._asked(body, name) as (begun, response):
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if not data or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise AnswerError(f"the server answered `{event['error']}`")
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        took = took or time.perf_counter() - begun
                    tokens += choice.get("token_ids") or []
                    logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
                    finish = choice["finish_reason"] or finish
        if took is None:
            raise AnswerError("the server answered without a token")
        return took, Answer([Choice(tokens, logprobs, finish)])

    def whole(self, prompt: Sequence[int], params: dict[str, Any] | None = None) -> tuple[float, dict[str, Any] | None]:
        """Seconds until the whole answer of one token is there, and its `kv_transfer_params`."""
        with self._asked(client.body(prompt, params=params, max_tokens=1)) as (begun, response):
            text = response.read()
            took = time.perf_counter() - begun
        return took, json.loads(text).get("kv_transfer_params")

    @contextmanager
    def _asked(self, body: dict[str, Any], name: str | None = None) -> Iterator[tuple[float, http.client.HTTPResponse]]:
        text = json.dumps(body)
        headers = {"Content-Type": "application/json"} | ({} if name is None else {"X-Request-Id": name})
        connection = http.client.HTTPConnection(self._host, timeout=client.ANSWER_S)
        try:
            connection.connect()
            begun = time.perf_counter()
            connection.request("POST", "/v1/completions", text, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise AnswerError(f"the server answered {response.status}: {response.read()[:500]!r}")
            yield begun, response
        finally:
            connection.close()


def hand_over(producer: Asker, consumer: Asker, prompt: Sequence[int], *, swapped: bool) -> tuple[Times, Answer]:
    """One prompt through a pair of servers: the five times, and what the consumer answered."""
    times: Times = {}
    times["prefill"], params = producer.whole(prompt, dict(ASK))
    times["load"], answer = consumer.first(prompt, params)
    times["local"], again = consumer.first(prompt)
    if not same(answer, again):
        raise RuntimeError(f"the consumer answered `{answer}` after a load and `{again}` from its own cache")
    for name in ("export", "answer") if swapped else ("answer", "export"):
        times[name], params = producer.whole(prompt, dict(ASK) if name == "export" else None)
        if name == "export":
            consumer.first(prompt, params)  # lets the producer's blocks go
    return times, answer


def measure(
    folder: Path,
    model: Path,
    setups: Sequence[Setup],
    *,
    requests: int,
    tokens: int,
    rounds: int,
    seed: int,
) -> dict[str, Any]:
    """Asks all set-ups for the same prompts, in turns.

    Returns:
        `alone`: seconds to the first token without a connector, by prompt; `setups`: for each set-up, `times` by
        prompt, how many answers were `wrong`, how many prompts `failed` (those have no times, and the ones to warm up
        count too), and what `moved`, as the consumer's metrics say.
    """
    block = 2 * tokens + 4096
    arguments = ["--max-model-len", str(tokens + 64), "--max-num-batched-tokens", str(tokens + 64)]
    arguments += ["--kv-cache-memory-bytes", str(cache_bytes(model, block))]
    asked = prompts(requests, tokens, seed)
    warm = prompts(rounds * (len(setups) * _WARM_UPS + 1), tokens, seed + 1)
    alone: list[float] = []
    expected: list[Answer] = []
    times: dict[str, list[Times]] = {setup.name: [] for setup in setups}
    wrong, failed = dict.fromkeys(times, 0), dict.fromkeys(times, 0)
    moved: dict[str, dict[str, float]] = {}
    fleet = Fleet(folder, model, setups, arguments)
    try:
        for turn in range(rounds):
            part = range(turn * requests // rounds, (turn + 1) * requests // rounds)
            with fleet.only(_ALONE) as servers:
                asker = Asker(servers["both"])
                asker.first(warm.pop())
                for index in part:
                    took, answer = asker.first(asked[index])
                    alone.append(took)
                    expected.append(answer)
            # Whoever is always first or last would have the machine in another state.
            for setup in setups if turn % 2 else list(reversed(setups)):
                with fleet.only(setup.name) as servers:
                    producer, consumer = Asker(servers["producer"]), Asker(servers["consumer"])
                    failed[setup.name] += _warm_up(producer, consumer, warm)
                    for index in part:
                        try:
                            found, answer = hand_over(producer, consumer, asked[index], swapped=bool(index % 2))
                        except AnswerError as error:
                            failed[setup.name] += 1
                            print(f"`{setup.name}` failed: {error}", file=sys.stderr, flush=True)
                            continue
                        times[setup.name].append(found)
                        wrong[setup.name] += not same(answer, expected[index])
                    moved[setup.name] = _moved(setup, servers["consumer"])
            print(f"asked `{len(alone)}` of `{requests}` prompts", file=sys.stderr, flush=True)
    finally:
        fleet.close()
    return {
        "alone": alone,
        "setups": {
            name: {"times": times[name], "wrong": wrong[name], "failed": failed[name], "moved": moved[name]}
            for name in times
        },
    }


def _warm_up(producer: Asker, consumer: Asker, warm: list[list[int]]) -> int:
    """Lets a pair find each other again. Returns how often it failed to."""
    for tried in range(_WARM_UPS):
        try:
            hand_over(producer, consumer, warm.pop(), swapped=False)
        except AnswerError as error:
            print(f"not warm yet: {error}", file=sys.stderr, flush=True)
        else:
            return tried
    raise RuntimeError(f"none of `{_WARM_UPS}` prompts to warm up came through")


def _moved(setup: Setup, consumer: Server) -> dict[str, Any]:
    """What the consumer's metrics say of all that it has loaded so far: transfers, bytes, failures and paths."""
    with urllib.request.urlopen(f"{consumer.url}/metrics", timeout=client.ANSWER_S) as answer:
        text = answer.read().decode()
    named = re.findall(rf"^vllm:{setup.connector}_(\w+){{([^}}]*)}} (\S+)$", text, re.MULTILINE)
    sums = {name: float(value) for name, _, value in named}
    labels = {
        path[1]: float(value)
        for name, text, value in named
        if name == "num_transfers_total" and (path := re.search(r'path="([^"]*)"', text))
    }
    return {
        "bytes": sums.get("bytes_transferred_sum", 0.0),
        "transfers": sums.get("bytes_transferred_count", 0.0),
        "failed": sums.get("num_failed_transfers_total", 0.0),
        "paths": labels,
    }


def cache_bytes(model: Path, tokens: int) -> int:
    """Bytes of KV cache for so many tokens."""
    config = json.loads((model / "config.json").read_text())
    return 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * tokens
