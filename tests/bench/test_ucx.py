"""`pdkv bench --transport ucx` on real engines and a real UCX: every byte, both manners, and the rows beside."""

import os
import shutil
from ctypes.util import find_library

import pytest

from bench.test_real import TINY, rows
from pdkv import wheels

FOUND = bool(find_library("ucp") or wheels.folders())
if not FOUND and os.environ.get("PDKV_UCX_REQUIRED") == "1":
    pytest.fail("there is no UCX, and PDKV_UCX_REQUIRED is set", pytrace=False)
pytestmark = pytest.mark.skipif(not FOUND, reason="there is no UCX: make ucx")


@pytest.mark.parametrize("tls", ["posix,cma", "tcp"])
@pytest.mark.parametrize(("policy", "manner"), [("any", "put/get"), ("never", "active messages")])
def test_every_byte_arrives_beside_the_loop_and_ucx_s_own_benchmark(tls, policy, manner):
    found = rows(*TINY, "--transport", "ucx", "--ucx-tls", tls, "--ucx-one-sided", policy, "--op", "pull,write")
    assert {row["wrong"] for row in found} == {0}
    for op, verb, at in (("pull", "get", 0), ("write", "put", 4)):
        ours, loop, one_block, peer = found[at : at + 4]
        assert (ours["op"], ours["transport"]) == (op, "ucx")
        assert ours["note"].startswith(manner), ours["note"]
        assert (loop["op"], one_block["op"]) == (f"ucp_{verb}_nbx loop", f"ucp_{verb}_nbx loop, one block")
        assert ours["limit_gb_per_s"] == loop["gb_per_s"]
        assert ours["iters"] == loop["iters"] == one_block["iters"] == 2
        assert peer["op"].startswith("ucx_perftest ucp_")
        if shutil.which("ucx_perftest") or any(origin == "libucx wheel" for origin, _ in wheels.folders()):
            assert peer["iters"] == 2, peer["note"]
        else:
            assert "ucx_perftest" in peer["note"]
