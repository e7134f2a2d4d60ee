"""Many requests of all kinds, of which some leave; a server of each role is killed and comes back. None is wrong."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from with_vllm import client
from with_vllm.answers import Answer, Choice, same
from with_vllm.engines import ASK
from with_vllm.fleet import LEASE_S
from with_vllm.prompts import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SEED = 5
REQUESTS, AT_ONCE, NEW_TOKENS = 200, 8, 6
# After how many answers a server is killed, and which.
KILLS = {60: "prefills", 120: "decodes"}


@dataclass
class Wanted:
    """One request: what is asked, how, and when its client leaves."""

    number: int
    prompt: list[int]
    tokens: int
    streamed: bool
    leave_after: int | None


def wishes():
    """All requests, the same for the same seed. Prompts come again, so there are hits in the prefix caches."""
    dice = random.Random(SEED)
    prompts = [prompt(dice.randrange(2, 150), 500 + number) for number in range(24)]
    for number in range(REQUESTS):
        streamed = dice.random() < 0.5
        leave = dice.randrange(3) if streamed and dice.random() < 0.4 else None
        yield Wanted(number, dice.choice(prompts), dice.randrange(1, NEW_TOKENS + 1), streamed, leave)


def beginning(answer, tokens):
    """The answer to a request for fewer tokens."""
    [choice] = answer.choices
    return Answer([Choice(choice.tokens[:tokens], choice.logprobs[:tokens], "length")])


def outcome(fleet, wanted, reference):
    """What became of the request: `right`, `wrong`, `left`, `failed` in whatever way, or `hung`."""
    ask = client.stream if wanted.streamed else client.complete
    more = {"leave_after": wanted.leave_after} if wanted.streamed else {}
    try:
        answer = ask(fleet.proxy.url, wanted.prompt, max_tokens=wanted.tokens, **more)
    except (client.RefusedError, OSError, client.BrokenError) as error:
        silent = isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
        return "hung" if silent else "failed", f"{wanted}: {error!r}"
    if answer is None:
        return "left", None
    right = same(answer, beginning(reference, wanted.tokens))
    return ("right", None) if right else ("wrong", f"seed {SEED}, {wanted}: {answer} is not {reference}")


def test_no_answer_is_wrong_and_nothing_is_left_behind(fleet):
    wanted = list(wishes())
    unique = {tuple(one.prompt) for one in wanted}
    sent = {one: fleet.reference.send(one, max_tokens=NEW_TOKENS) for one in unique}
    references = {one: fleet.reference.wait(request_id) for one, request_id in sent.items()}
    answered = itertools.count(1)
    restarts = []

    def serve(one):
        found = outcome(fleet, one, references[tuple(one.prompt)])
        victims = KILLS.get(next(answered))
        if victims:
            victim = getattr(fleet, victims)[1]
            victim.kill()
            victim.start()
            restarts.append(victim)
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(serve, wanted))
    for victim in restarts:
        victim.wait()
    kinds = Counter(kind for kind, _ in found)
    texts = [text for _, text in found if text]
    assert not kinds["wrong"], texts
    assert not kinds["hung"], texts
    assert len(restarts) == len(KILLS)
    # A kill costs at most what was under way, and what was on its way to whoever waited for the dead.
    assert kinds["failed"] <= 2 * AT_ONCE * len(KILLS), texts
    assert kinds["left"] > 10

    for prefill, decode in itertools.product(fleet.prefills, fleet.decodes):
        one = prompt(70, 900)
        params = client.complete(prefill.url, one, max_tokens=1, params=dict(ASK)).params
        assert same(client.complete(decode.url, one, params=params), fleet.reference.ask(one))
    for server in fleet.servers:
        wait_until_empty(server)


def wait_until_empty(server):
    """Waits until the server uses none of its blocks, which an abandoned hand-over may take a lease for."""
    deadline = time.monotonic() + LEASE_S + client.ANSWER_S
    while True:
        # The gauge is of the last step, so there has to be one.
        client.complete(server.url, prompt(1, 1), max_tokens=1)
        used = client.metric(server.url, "vllm:kv_cache_usage_perc")
        running = client.metric(server.url, "vllm:num_requests_running")
        if used == running == 0:
            return
        assert time.monotonic() < deadline, f"`{server.name}` still uses {used:.2%} for {running} requests"
        time.sleep(1)
