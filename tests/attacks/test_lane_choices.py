"""Ends of a lane that may not use the same transports: UCX chooses at each end, and must not be let choose twice."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import pdkv
from attacks import lanes
from attacks.far import until

FEW = list(range(8))
SAME = [(block, block) for block in FEW]
UNLIKE = [("posix,tcp", "sysv,tcp"), ("all", "tcp"), ("tcp", "all"), ("posix,cma", "posix")]
NOBODY = 65534
BYTES = 1 << 20

OWNER = f"""
import json, sys
import numpy as np, pdkv
config = json.loads(sys.argv[1])
ucx = pdkv.UcxConfig(library=config["library"], one_sided="never", settings={{"TLS": "all"}})
with pdkv.Engine("owner", transports=["ucx", "tcp"], ucx=ucx) as engine:
    region = engine.register(np.full({BYTES}, 7, np.uint8))
    print(engine.address, flush=True)
    print(region.describe().to_json(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(("ours", "theirs"), UNLIKE)
def test_ends_with_unlike_transports_use_what_both_have(start, ours, theirs):
    owner = start("owner", "ucx", seed=1, **lanes.lane(theirs, "am"))
    initiator = start("initiator", "ucx", seed=2, **lanes.lane(ours, "am"))
    initiator.do("connect", owner.address)
    _, reference = owner.do("export", FEW)
    assert initiator.do("try_pull", reference, FEW)["state"] == "done"
    assert initiator.do("wrong", 1, SAME) == []
    assert owner.do("stats")["live_claims"] == 0


@pytest.mark.parametrize("manner", ["am", "kernel"])
@pytest.mark.parametrize(("ours", "theirs"), [("system", "nixl"), ("nixl", "system")])
def test_releases_that_were_not_tried_together_get_no_lane_and_both_live(start, ours, theirs, manner):
    lanes.need(ours)
    lanes.need(theirs)
    if min(lanes.version(ours), lanes.version(theirs)) >= (1, 22, 0):
        pytest.skip("both are of releases that understand each other")
    both = {"transports": ["ucx", "tcp"]}
    owner = start("owner", "ucx", seed=1, **{**lanes.lane("all", manner, theirs), **both})
    initiator = start("initiator", "ucx", seed=2, **{**lanes.lane("all", manner, ours), **both})
    peer = initiator.do("connect", owner.address)
    # Beside `tcp` nobody waits long for the lane.
    until(lambda: "still being made" not in initiator.do("lane", peer), "the end of the attempt")
    _, reference = owner.do("export", FEW)
    outcome = initiator.do("try_pull", reference, FEW, require="ucx")
    assert "understand each other" in str(outcome["error"]), outcome
    assert initiator.do("try_pull", reference, FEW)["state"] == "done"
    assert initiator.do("wrong", 1, SAME) == []
    assert owner.do("stats")["live_claims"] == 0


@pytest.mark.parametrize("copy", sorted(lanes.COPIES))
def test_another_user_gets_a_lane_or_a_reason_and_both_live(copy):
    """One end may open the other's shared memory and the other may not, so each alone would choose otherwise."""
    lanes.need(copy)
    other = ["setpriv", f"--reuid={NOBODY}", "--clear-groups", sys.executable, "-c"]
    try:
        subprocess.run([*other, "import pdkv"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no process of another user can be had here: {error}")
    command = [*other, OWNER, json.dumps({"library": lanes.COPIES[copy]})]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            address, described = owner.stdout.readline().strip(), owner.stdout.readline()
            into = np.zeros(BYTES, np.uint8)
            ucx = pdkv.UcxConfig(library=lanes.COPIES[copy], one_sided="never", settings={"TLS": "all"})
            with pdkv.Engine("initiator", transports=["ucx", "tcp"], ucx=ucx) as engine:
                target = engine.register(into)
                peer = engine.connect(address, timeout_s=30)
                lane = next(link for link in peer.links() if link.transport == "ucx")
                assert lane.why, "a lane, or why there is none"
                require = "ucx" if lane.usable else None
                peer.read(target, pdkv.RegionDescriptor.from_json(described), require=require).wait(timeout_s=60)
            assert (into == 7).all()
            assert owner.poll() is None
        finally:
            owner.kill()
