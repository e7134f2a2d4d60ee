"""`--compare ucxx`, with the bindings where they are installed and with a stand-in everywhere."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

from bench.test_real import COMMAND, TINY
from pdkv.bench import ucxx_peer
from pdkv.errors import UnsupportedError

STAND_IN = os.pathsep.join(filter(None, [str(Path(__file__).parent / "stand_in"), os.environ.get("PYTHONPATH")]))


def rows(*arguments, **environment):
    done = subprocess.run(
        [*COMMAND, *TINY, "--compare", "ucxx", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, [row for row in json.loads(done.stdout)["rows"] if row["op"] == "ucxx tag"], done.stderr


def test_the_same_pages_move_and_are_checked():
    code, found, _ = rows("--transport", "shm,tcp", "--burst", "2", "--ucx-tls", "tcp", PYTHONPATH=STAND_IN)
    assert code == 0
    assert [(row["kind"], row["transport"], row["wrong"]) for row in found] == [("peer", "shm", 0), ("peer", "tcp", 0)]
    for row in found:
        assert row["iters"] == 2
        assert row["note"].startswith("ucxx 0.stand-in, UCX 1.2.3, UCX_TLS=tcp")


def test_a_wrong_byte_of_a_peer_is_counted_and_traced():
    code, (row,), errors = rows("--transport", "shm", PYTHONPATH=STAND_IN, STAND_IN="flip")
    assert code == 1
    assert row["wrong"] > 0
    assert "wrong: ucxx stamp" in errors


def test_a_peer_that_cannot_take_part_keeps_its_row_and_says_why():
    code, (row,), _ = rows("--transport", "shm", PYTHONPATH=STAND_IN, STAND_IN="no worker")
    assert code == 0
    assert (row["gb_per_s"], row["ratio"], row["pdkv_ratio"]) == (0.0, None, None)
    assert "no such device" in row["note"]


def test_a_peer_whose_destructors_wait_for_ever_ends_nevertheless():
    code, (row,), _ = rows("--transport", "shm", PYTHONPATH=STAND_IN, STAND_IN="never ends")
    assert code == 0
    assert row["iters"] == 2


@pytest.mark.skipif(importlib.util.find_spec("ucxx") is not None, reason="ucxx is installed")
def test_without_the_bindings_nothing_is_measured():
    with pytest.raises(UnsupportedError) as caught:
        ucxx_peer.check()
    assert "pdkv[bench-peers]" in str(caught.value)
    done = subprocess.run([*COMMAND, "--compare", "ucxx"], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pdkv[bench-peers]" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")
@pytest.mark.parametrize("tls", ["posix,cma", "tcp"])
def test_the_bindings_themselves(tls):
    code, (row,), errors = rows("--transport", "shm", "--ucx-tls", tls)
    assert code == 0, errors
    assert row["wrong"] == 0
    assert row["iters"] == 2, row["note"]
