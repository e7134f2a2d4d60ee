"""Probes take instances out and in; /health, /v1/models and /metrics say what is."""

from __future__ import annotations

import asyncio
import json

import pytest

from proxy.world import run, until, world

PROMPT = {"prompt": "Once upon a time", "max_tokens": 5}


def test_healthy_while_there_is_one_of_each():
    async def main():
        async with world(prefill=2, decode=2) as w:
            for ill, status in [([0], 200), ([0, 2], 200), ([0, 1], 503), ([2, 3], 503), ([], 200)]:
                for at, engine in enumerate(w.prefill + w.decode):
                    engine.well = 500 if at in ill else 200
                await w.look()
                got, text = await w.get("/health")
                assert got == status
                said = json.loads(text)
                assert said["status"] == ("ok" if status == 200 else "unavailable")
                shown = {**said["prefill"], **said["decode"]}
                assert shown == {e.url: at not in ill for at, e in enumerate(w.prefill + w.decode)}
                counts = await w.counts()
                assert counts[f'pdkv_proxy_instance_healthy{{instance="{w.prefill[0].url}",role="prefill"}}'] == (
                    0 not in ill
                )

    run(main)


def test_an_ill_instance_is_asked_nothing_until_it_is_well():
    async def main():
        async with world(decode=2) as w:
            w.decode[0].well = 503
            await w.look()
            for _ in range(4):
                assert (await w.ask(PROMPT))[0] == 200
            assert (len(w.decode[0].seen), len(w.decode[1].seen)) == (0, 4)
            w.decode[0].well = 200
            await w.look()
            for _ in range(4):
                assert (await w.ask(PROMPT))[0] == 200
            assert w.decode[0].seen

    run(main)


def test_a_late_answer_takes_out_only_when_it_comes_three_times():
    async def main():
        async with world(probe_interval_s=0.05) as w:
            await w.proxy._probes.stop()  # by hand from here
            while not w.instances[1].healthy:  # its first answer may have been late too
                await w.look()
            w.decode[0].well = None
            for healthy in (True, True, False):
                await w.look()
                assert w.instances[1].healthy == healthy
            w.decode[0].well = 200
            while not w.instances[1].healthy:
                await w.look()

    run(main)


def test_probes_go_on_in_the_background():
    async def main():
        async with world(probe_interval_s=0.02) as w:
            await until(lambda: w.decode[0].probes > 3)
            w.decode[0].well = 500
            await until(lambda: not w.instances[1].healthy)
            w.decode[0].well = 200
            await until(lambda: w.instances[1].healthy)

    run(main)


def test_a_leg_that_breaks_off_has_its_instance_probed_now():
    async def main():
        async with world() as w:  # whose next probe would be due in 30 s
            w.decode[0].drop, w.decode[0].well = True, 500
            assert (await w.ask(PROMPT))[0] == 502
            await until(lambda: not w.instances[1].healthy)

    run(main)


def test_models_are_those_of_a_decode_instance():
    async def main():
        async with world(decode=2) as w:
            w.decode[0].drop = True
            headers = {"Authorization": "Bearer s"}
            async with w.client.get(w.url + "/v1/models", headers=headers) as response:
                assert response.status == 200
                assert await response.json() == {"object": "list", "data": [{"id": "tiny"}]}
            assert [e.seen[0].headers["Authorization"] for e in w.decode] == ["Bearer s", "Bearer s"]
            assert w.prefill[0].seen == []
            w.decode[1].status = 401
            await w.look()
            statuses = {(await w.get("/v1/models"))[0] for _ in range(2)}
            assert statuses == {401}
            await w.idle()

    run(main)


def test_metrics_name_every_instance_from_the_start_and_count_legs():
    async def main():
        async with world() as w:
            async with w.client.get(w.url + "/metrics") as response:
                assert response.content_type == "text/plain"
            before = await w.counts()
            for role, engine in (("prefill", w.prefill[0]), ("decode", w.decode[0])):
                assert before[f'pdkv_proxy_in_flight_requests{{instance="{engine.url}",role="{role}"}}'] == 0
            for _ in range(3):
                await w.ask(PROMPT)
            w.prefill[0].status = 400
            await w.ask(PROMPT)  # nothing was prefilled, so there is no time of it
            counts = await w.counts()
            for role, engine in (("prefill", w.prefill[0]), ("decode", w.decode[0])):
                assert counts[f'pdkv_proxy_legs_total{{instance="{engine.url}",outcome="2xx",role="{role}"}}'] == 3
            assert counts["pdkv_proxy_prefill_seconds_count"] == 3
            assert counts["pdkv_proxy_first_byte_seconds_count"] == 3

    run(main)


@pytest.mark.parametrize(("spoil", "outcome"), [("drop", "lost"), ("gate", "late"), ("status", "5xx")])
def test_legs_are_counted_by_how_they_ended(spoil, outcome):
    async def main():
        async with world(idle_timeout_s=1.0 if spoil == "gate" else 60.0) as w:
            setattr(w.decode[0], spoil, {"drop": True, "gate": asyncio.Event(), "status": 500}[spoil])
            await w.ask(PROMPT | {"use_beam_search": True})  # the only leg
            name = f'pdkv_proxy_legs_total{{instance="{w.decode[0].url}",outcome="{outcome}",role="decode"}}'
            assert (await w.counts())[name] == 1

    run(main)
