"""The running vLLM calls the connector as the trace of its release says.

The same traces are replayed without vLLM by `tests/connectors`.
"""

from __future__ import annotations

import json
import random
from contextlib import ExitStack

import pytest
import vllm

from connectors.replay import trace
from with_vllm import settings
from with_vllm.engines import ASK, Engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

RELEASE = ".".join(vllm.__version__.split("+")[0].split(".")[:3])
STARTING, STOPPING = ("start_worker", "start_scheduler"), ("stop",)
WORKING = ("work_with_tokens", "work_without_tokens")


def engine(name, logs, model, role):
    """An engine, and the file that its connector's calls are written to."""
    file = logs / f"{name}.calls"
    transfer = settings.transfer("pdkv", role, recorded=str(file))
    transfer |= {"kv_connector": "RecordedConnector", "kv_connector_module_path": "with_vllm.recording"}
    return Engine(name, logs, model, transfer=transfer), file


def calls(file, side):
    """What was called on one side. Layers have one line, however many they are."""
    recorded = [json.loads(line) for line in file.read_text().splitlines()]
    layers = ("wait_for_layer_load", "save_kv_layer")
    ours, seen = [], False
    for where, hook, arguments in recorded:
        if where != side:
            continue
        if hook in layers:
            if seen and hook in seen:
                continue
            seen = {hook, *(seen or ())}
        else:
            seen = False
        ours.append((hook, arguments))
    return ours


def cut(recorded, among):
    """Cuts calls into parts of the trace, the longest that fits first, and gives the parts' names."""
    parts = {
        name: [(hook, len(arguments)) for hook, *arguments in trace(RELEASE)[name]]
        for name in among
        if name in trace(RELEASE)
    }
    found, at = [], 0
    while at < len(recorded):
        fitting = [name for name, part in parts.items() if recorded[at : at + len(part)] == part]
        assert fitting, f"no part of the trace goes on like this: {recorded[at : at + 12]}"
        name = max(fitting, key=lambda name: len(parts[name]))
        found.append(name)
        at += len(parts[name])
    return found


@pytest.fixture(scope="module")
def recorded(logs, tiny):
    """A prompt that is prefilled by one engine and decoded by another, and one that the latter does alone."""
    with ExitStack() as stack:
        prefill, prefill_calls = engine("recorded-p", logs, tiny, "kv_producer")
        stack.callback(prefill.kill)
        decode, decode_calls = engine("recorded-d", logs, tiny, "kv_consumer")
        stack.callback(decode.kill)
        prompt = random.Random(1).choices(range(2, 400), k=100)
        params = prefill.ask(prompt, params=dict(ASK), max_tokens=1).params
        decode.ask(prompt, params=params, max_tokens=3)
        decode.ask(prompt[::-1], max_tokens=3)
        for each in (prefill, decode):
            each.wait_until_idle()
            assert each.close()
        yield prefill_calls, decode_calls


def test_both_sides_of_both_engines_are_called_as_the_trace_says(recorded):
    scheduling = [name for name in trace(RELEASE) if name not in {"release", *STARTING, *WORKING}]
    told = set()
    for file in recorded:
        worker = cut(calls(file, "worker"), ("start_worker", *WORKING, *STOPPING))
        assert worker[0] == "start_worker"
        scheduler = cut(calls(file, "scheduler"), ("start_scheduler", *scheduling))
        assert scheduler[0] == "start_scheduler"
        told |= {*worker, *scheduler}
        steps = [name for name in scheduler if name in ("schedule", "update", "update_nothing", "finish")]
        for at, name in enumerate(steps):
            if name == "finish":
                # A request's end is told between what a step brings and what came of it.
                assert steps[at - 1] in ("schedule", "finish")
                assert steps[at + 1] in ("update", "update_nothing", "finish")
    assert told | {"loaded", "loading", "stop"} >= {name for name in trace(RELEASE) if name != "release"}
