"""The command itself: what it prints, signals, and engines that are killed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from proxy.engine import expected
from proxy.world import PATIENCE_S, events, spoken

PROMPT = {"prompt": "Once upon a time", "max_tokens": 5}


@contextmanager
def process(*command, cwd=None):
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd) as child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def engine(role="plain"):
    with process(sys.executable, "-m", "proxy.engine", role, cwd=Path(__file__).parents[1]) as child:
        yield child, child.stdout.readline().strip()


@contextmanager
def proxy(prefill, decode, *options, before=()):
    command = [sys.executable, "-m", "pdkv.cli", "proxy", "--prefill", prefill, "--decode", decode, "--port", "0"]
    with process(*before, *command, *options) as child:
        line = child.stdout.readline()
        assert line.startswith("pdkv proxy listens on http://127.0.0.1:"), child.stderr.read()
        yield child, line.split()[-1]


def ask(url, body):
    return urllib.request.urlopen(
        urllib.request.Request(
            url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        ),
        timeout=PATIENCE_S,
    )


def test_an_engine_that_is_killed_in_the_middle_of_a_stream_and_one_that_comes_after_it():
    with engine() as (_, prefill), engine("stuck") as (victim, decode), proxy(prefill, decode) as (child, url):
        with ask(url, PROMPT | {"stream": True}) as answer:
            first = [answer.readline() + answer.readline() for _ in range(3)]
            victim.kill()
            rest = answer.read()
        *good, last = events((b"".join(first) + rest).decode())
        assert spoken(good) == "".join(expected(PROMPT).partition(" ")[0:0]) or expected(PROMPT).startswith(
            spoken(good)
        )
        assert len(good) == 3
        assert last["error"]["code"] == 502
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(url, PROMPT)
        assert refused.value.code == 503
        assert json.load(refused.value)["error"]["type"] == "ServiceUnavailableError"
        child.terminate()
        assert child.wait(PATIENCE_S) == 0


def test_as_many_connections_as_the_machine_allows():
    few = ("sh", "-c", 'ulimit -Sn 256 && exec "$@"', "sh")
    with engine() as (_, url), proxy(url, url, before=few) as (child, _):
        [line] = [one for one in Path(f"/proc/{child.pid}/limits").read_text().splitlines() if "open files" in one]
        soft, hard = line.split()[3:5]
        assert soft == hard != "256"


def test_a_client_that_leaves_is_noticed_while_nothing_is_sent():
    with stuck_stream() as (_, url, answer):
        answer.readline()
        answer.close()
        while 'requests_total{endpoint="completions",outcome="cancelled"} 1.0' not in page(url + "/metrics"):
            time.sleep(0.01)  # the test's own time-out ends it
        assert 'outcome="cancelled",role="decode"} 1.0' in page(url + "/metrics")


def page(url):
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def test_sigterm_with_a_stuck_request_ends_it_with_an_event_and_then_the_proxy():
    with stuck_stream("--drain-timeout", "0.1") as (child, _, answer):
        first = answer.readline() + answer.readline()
        child.terminate()
        said = events((first + answer.read()).decode())
        assert said[-1]["error"]["message"] == "the proxy is shutting down"
        assert child.wait(PATIENCE_S) == 0
        assert "Traceback" not in child.stderr.read()


def test_a_second_signal_waits_for_nobody():
    with stuck_stream("--drain-timeout", "1000") as (child, url, answer):
        answer.readline()
        child.send_signal(signal.SIGINT)
        wait_until_it_refuses(url)  # a signal before the first was handled would be the same one
        child.send_signal(signal.SIGTERM)
        assert b"shutting down" in answer.read()
        assert child.wait(PATIENCE_S) == 0


@contextmanager
def stuck_stream(*options):
    with (
        engine() as (_, prefill),
        engine("stuck") as (_, decode),
        proxy(prefill, decode, *options) as (child, url),
        ask(url, PROMPT | {"stream": True}) as answer,
    ):
        yield child, url, answer


def wait_until_it_refuses(url):
    host, port = url.removeprefix("http://").split(":")
    while True:
        time.sleep(0.01)
        try:
            socket.create_connection((host, int(port)), timeout=PATIENCE_S).close()
        except ConnectionRefusedError:
            return
        except ConnectionResetError:
            continue  # it was just about to


def refused(*options):
    command = [sys.executable, "-m", "pdkv.cli", "proxy", "--prefill", "http://h:1", "--decode", "http://h:1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


def test_other_commands_load_no_http_library():
    code = "import sys, pdkv.cli, pdkv.proxy.cli; sys.exit(bool({'aiohttp', 'prometheus_client'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refused("--port", port)


def test_beyond_loopback_is_refused_with_the_way_out():
    text = refused("--host", "0.0.0.0")
    assert "0.0.0.0" in text
    assert "--insecure" in text
