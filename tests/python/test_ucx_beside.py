"""pdkv beside another UCX in the process: torch, NIXL and ucxx each bring one, and load it in one way or another."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOADED_FIRST = """
import ctypes, os, sys, time
from pathlib import Path
import pdkv
from pdkv import _core, wheels

library, how = sys.argv[1:]
theirs = ctypes.CDLL(library, mode=getattr(ctypes, how))
origin, path, _, _, refused = _core.ucx_candidates(wheels.folders())[0]
assert (origin, refused) == ("process", None), (origin, path, refused)
facts = _core.ucx_probe(path)
numbers = [ctypes.c_uint() for _ in range(3)]
theirs.ucp_get_version(*map(ctypes.byref, numbers))
assert facts["version"] == ".".join(str(number.value) for number in numbers), "another copy than theirs"
names = {transport for transport, _ in facts["transports"]}
assert "posix" in names and "tcp" not in names, facts
copies = {Path(line.split()[-1]).resolve() for line in open("/proc/self/maps") if "libucp" in line}
assert copies == {Path(facts["library"])}, copies

# Bytes go over it.
target = bytearray(4096)
with pdkv.Engine("a", transports=["ucx", "tcp"]) as a, pdkv.Engine("b", transports=["ucx", "tcp"]) as b:
    source = a.register(bytearray(range(256)) * 16).describe()
    peer = b.connect(a.address, timeout_s=60)
    # Beside `tcp` nobody waits long for the lane; this test does.
    while "still being made" in {name: why for name, _, why in peer.links()}["ucx"]:
        time.sleep(0.01)
    transfer = peer.read(b.register(target), source, require="ucx")
    transfer.wait(60)
    assert target == bytes(range(256)) * 16
    assert f"UCX {facts['version']}" in transfer.path.detail, transfer.path.detail

# What would mix with it is refused before it is loaded, and what cannot is not.
others = [Path(text) for text in os.environ["OTHERS"].split(":") if text]
for other in others:
    try:
        found = _core.ucx_probe(str(other))
    except pdkv.UnsupportedError as error:
        assert "libuc" in error.message, error
        continue
    same = Path(found["library"]) == Path(facts["library"])
    assert same or "libucp-" in other.name or "libucp-" in facts["library"], other
print("fine")
"""


def copies():
    """The copies to try: the system's, and those that the environment names."""
    system = ctypes.util.find_library("ucp")
    named = [text for text in os.environ.get("PDKV_TEST_UCX", "").split(":") if text]
    return ([system] if system else []) + named


COPIES = copies()


def test_there_are_copies_to_try():
    if not COPIES and os.environ.get("PDKV_UCX_REQUIRED") != "1":
        pytest.skip("no UCX here: `make ucx` installs some")
    assert COPIES


@pytest.mark.parametrize("how", ["RTLD_LOCAL", "RTLD_GLOBAL"])
@pytest.mark.parametrize("library", COPIES, ids=lambda text: Path(text).name)
def test_a_copy_that_somebody_loaded_is_used(library, how):
    done = subprocess.run(
        [sys.executable, "-c", LOADED_FIRST, library, how],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OTHERS": ":".join(copy for copy in COPIES if copy != library)},
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


WITH_NIXL = """
import os, sys
import numpy as np

def nixl():
    from nixl_cu12 import nixl_agent, nixl_agent_config
    ours, theirs = (nixl_agent(name, nixl_agent_config(backends=["UCX"])) for name in "ab")
    src, dst = np.arange(1 << 16, dtype=np.uint8), np.zeros(1 << 16, np.uint8)
    for agent, memory in (ours, src), (theirs, dst):
        agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    name = ours.add_remote_agent(theirs.get_agent_metadata())
    near, far = (
        agent.get_xfer_descs([(memory.ctypes.data, memory.nbytes, 0)], "DRAM")
        for agent, memory in ((ours, src), (theirs, dst))
    )

    def move():
        dst[:] = 0
        handle = ours.initialize_xfer("WRITE", near, far, name, b"")
        state = ours.transfer(handle)
        while state != "DONE":
            assert state != "ERR"
            state = ours.check_xfer_state(handle)
        ours.release_xfer_handle(handle)
        assert (dst == src).all()

    move.keeps = ours, theirs
    return move

def lanes():
    import pdkv
    engines = [pdkv.Engine(name, transports=["ucx"]) for name in "pc"]
    kv = np.arange(1 << 15, dtype=np.uint16).reshape(4, 8, 1, 16, 64), np.zeros((4, 8, 1, 16, 64), np.uint16)
    owner, taker = (
        engine.register_kv_cache(memory, layout="LBHNC", block_tokens=16)
        for engine, memory in zip(engines, kv, strict=True)
    )
    engines[1].connect(engines[0].address, timeout_s=60)

    def move():
        kv[1][:] = 0
        transfer = taker.pull(owner.export([1, 2, 3]).reference, [3, 4, 5])
        transfer.wait(60)
        assert (kv[1][:, [3, 4, 5]] == kv[0][:, [1, 2, 3]]).all()
        assert "UCX" in transfer.path.detail

    move.engines = engines
    return move

make = {"nixl": nixl, "pdkv": lanes}
moves = {}
for name in sys.argv[1:]:
    moves[name] = make[name]()
    moves[name]()
for _ in range(10):
    for move in moves.values():
        move()
for engine in moves["pdkv"].engines:
    engine.close()
moves["nixl"]()
print("fine", flush=True)
os._exit(0)  # on a host with EFA's driver, NIXL's UCX ends a process that exits in order with a fault, without pdkv too
"""


@pytest.mark.parametrize("library", [None, *COPIES], ids=lambda text: Path(text).name if text else "searched")
@pytest.mark.parametrize("order", [("nixl", "pdkv"), ("pdkv", "nixl")], ids="-first,".join)
def test_nixl_and_pdkv_move_bytes_in_one_process(order, library):
    if importlib.util.find_spec("nixl_cu12") is None:
        assert os.environ.get("PDKV_UCX_REQUIRED") != "1"
        pytest.skip("no NIXL here: `make ucx` installs it")
    named = {"PDKV_UCX_LIBRARY": library} if library else {}
    done = subprocess.run(
        [sys.executable, "-c", WITH_NIXL, *order],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **named},
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["fine"]), done.stdout + done.stderr


WITH_THEIRS = """
import ctypes, sys
if sys.argv[1] == "import":
    import libucx
    libucx.load_library()
else:
    ctypes.CDLL(sys.argv[1])
import pdkv
import numpy as np
engines = [pdkv.Engine(name, transports=["ucx"]) for name in "pc"]
kv = np.arange(1 << 15, dtype=np.uint16).reshape(4, 8, 1, 16, 64), np.zeros((4, 8, 1, 16, 64), np.uint16)
owner, taker = (
    engine.register_kv_cache(memory, layout="LBHNC", block_tokens=16)
    for engine, memory in zip(engines, kv, strict=True)
)
engines[1].connect(engines[0].address, timeout_s=60)
transfer = taker.pull(owner.export([1, 2, 3]).reference, [3, 4, 5])
transfer.wait(60)
assert (kv[1][:, [3, 4, 5]] == kv[0][:, [1, 2, 3]]).all()
for engine in engines:
    engine.close()
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "libucp" in line}
assert len(libraries) == 1, libraries
print("fine")
"""


@pytest.mark.parametrize("library", ["import", *COPIES], ids=lambda text: Path(text).name)
def test_bytes_move_over_a_copy_that_somebody_loaded(library):
    if library == "import" and importlib.util.find_spec("libucx") is None:
        pytest.skip("no `libucx` wheel here: `make ucx` installs it")
    done = subprocess.run([sys.executable, "-c", WITH_THEIRS, library], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
