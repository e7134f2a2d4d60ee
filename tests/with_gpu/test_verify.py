"""`verify_copies`: a wrong byte of a GPU's copy ends the transfer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import pdkv

# Reads from one engine into another, the second time by a kernel that leaves one wrong byte.
_READS = """
import ctypes, os, sys
import numpy as np
import pdkv
from pdkv._core import CudaLoop

size, loop = 1 << 16, CudaLoop()
content, found = (np.arange(size) % 251 + 1).astype(np.uint8), np.zeros(size, np.uint8)
standin = ctypes.CDLL(os.environ["PDKV_CUDA_LIBRARY"])

def copy(dst, src):
    loop.copy(dst, src, size)
    loop.wait()

with pdkv.Engine("owner") as owner, pdkv.Engine("reader", verify_copies=sys.argv[1] == "True") as reader:
    source, target = (pdkv.Engine.allocate(size, device="cuda") for _ in range(2))
    there, here = owner.register(source).describe(), reader.register(target)
    peer = reader.connect(owner.address)
    for wrong in (False, True, False):
        copy(source.address, content.ctypes.data)
        copy(target.address, np.zeros(size, np.uint8).ctypes.data)
        if wrong:
            standin.standin_fail(b"wrong", 1, 1)
        try:
            peer.read(here, there, require="cuda").wait(timeout_s=60)
            outcome = "done"
        except pdkv.PdkvError as error:
            outcome = f"{type(error).__name__}: {error.message}"
        copy(found.ctypes.data, target.address)
        print(np.count_nonzero(found != content), outcome)
"""


@pytest.mark.parametrize("verify", [False, True])
def test_a_wrong_byte_ends_the_transfer_where_copies_are_verified(verify):
    # Nobody measures which way is faster on such a driver, by kernels that would go wrong first.
    told = {**os.environ, "PDKV_STANDIN_VERSION": "12040", "PDKV_STANDIN_POOLS": "0"}
    ran = subprocess.run([sys.executable, "-c", _READS, str(verify)], env=told, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    first, wrong, last = ran.stdout.splitlines()
    assert (first, last) == ("0 done", "0 done")
    if verify:
        text = "`65536` bytes in `1` pieces, not all of which lie at the destination as they were read"
        assert wrong == f"1 IntegrityError: {text}"
    else:
        assert wrong == "1 done", "nobody looks"


def test_what_is_no_answer_is_refused():
    with pytest.raises(TypeError):
        pdkv.Engine("bad", verify_copies="yes")
