"""pdkv beside another UCX in the process: torch, NIXL and ucxx each bring one, and load it in one way or another."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOADED_FIRST = """
import ctypes, os, sys
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
    transfer = b.connect(a.address).read(b.register(target), source, require="ucx")
    transfer.wait(20)
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
        timeout=60,
        env={**os.environ, "OTHERS": ":".join(copy for copy in COPIES if copy != library)},
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
