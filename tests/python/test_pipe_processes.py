"""`PdkvPipe` between two processes: both ways at once, a killed end, and a new one in its place on the same port."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import numpy as np
import pytest

from pdkv.pipe import BrokenPipeException, PdkvPipe
from places import host_of_its_own

WAIT_S = 60.0

# The other end: gives back what it gets, with one added, until None comes; then it closes.
ECHO = """
import json, sys
from pdkv.pipe import PdkvPipe

pipe = PdkvPipe(0, json.loads(sys.argv[1]), device="cpu")
while (array := pipe.recv_tensor(60)) is not None:
    pipe.send_tensor(array + 1)
pipe.send_tensor(None)
pipe.close(60)
"""


HOST = host_of_its_own()


@pytest.fixture
def port():
    with socket.create_server((HOST, 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture(params=[None, ["shm"], ["tcp"]], ids=["any", "shm", "tcp"])
def config(request, port):
    def config(rank):
        extra = {"store_timeout": WAIT_S} | ({"transports": request.param} if request.param else {})
        settings = {"kv_role": "kv_both", "kv_rank": rank, "kv_parallel_size": 2, "kv_ip": HOST, "kv_port": port}
        return {**settings, "kv_connector_extra_config": extra}

    return config


@pytest.fixture
def echo(config):
    """Starts the other end as a process of a rank; ends it with the test."""
    started = []

    def echo(rank):
        started.append(subprocess.Popen([sys.executable, "-c", ECHO, json.dumps(config(rank))]))
        return started[-1]

    yield echo
    for process in started:
        process.kill()
        process.wait(WAIT_S)


def ours(config, rank):
    return PdkvPipe(0, config(rank), device="cpu")


def works(pipe):
    large = np.arange(1 << 20, dtype=np.int32).reshape(4, -1)
    for array in (np.arange(3.0), large, large[:, ::2], np.zeros((2, 0), np.uint8)):
        pipe.send_tensor(array)
    for array in (np.arange(3.0), large, large[:, ::2], np.zeros((2, 0), np.uint8)):
        came = np.asarray(pipe.recv_tensor(WAIT_S))
        assert (came.dtype, came.shape) == (array.dtype, array.shape)
        assert np.array_equal(came, array + 1)


def send_until_told(pipe):
    while True:
        pipe.send_tensor(np.zeros(1 << 16))
        pipe.flush(WAIT_S)


@pytest.mark.parametrize("rank", [0, 1])
def test_both_ways_and_an_orderly_end(echo, config, rank):
    other = echo(1 - rank)
    with ours(config, rank) as pipe:
        works(pipe)
        assert pipe.stats["staged_bytes"] in (0, 2 << 20)  # what lies in every other word is gathered
        pipe.send_tensor(None)
        assert pipe.recv_tensor(WAIT_S) is None
        with pytest.raises(BrokenPipeException, match="Connection closed by peer"):
            pipe.recv_tensor(WAIT_S)
    assert other.wait(WAIT_S) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_end_and_a_new_one_in_its_place(echo, config, rank):
    for _ in range(2):
        other = echo(1 - rank)
        pipe = ours(config, rank)
        works(pipe)
        other.kill()
        with pytest.raises(BrokenPipeException):
            pipe.recv_tensor(WAIT_S)
        with pytest.raises(BrokenPipeException):
            send_until_told(pipe)
        pipe.abort()
    echo(1 - rank)
    with ours(config, rank) as pipe:
        works(pipe)
