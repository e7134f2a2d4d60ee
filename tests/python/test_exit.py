"""A process that used pdkv ends with code 0, whatever is dropped first and whatever still runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETUP = """
import gc, sys
import numpy as np
import pdkv

transport = sys.argv[1]

def side(name):
    engine = pdkv.Engine(name, transports=[transport])
    pool = engine.allocate(1 << 22, huge_pages=False)
    kv = np.frombuffer(pool, np.uint8).reshape(2, 64, 2, 16, 1024)
    return engine, pool, kv, engine.register_kv_cache(kv, layout="LBHNC", block_tokens=16)

producer, pool_p, kv_p, cache_p = side("producer")
consumer, pool_c, kv_c, cache_c = side("consumer")
peer = consumer.connect(producer.address)
export = cache_p.export(range(64))
transfer = cache_c.pull(export.reference, into=range(64))
"""

ORDERS = {
    "nothing is dropped": "",
    "a transfer still runs": "cache_c.pull(cache_p.export(range(64), consumers=9).reference, into=range(64))",
    "engines first": "del producer, consumer; gc.collect(); transfer.poll()",
    "children before parents": "transfer.wait(); del transfer, peer, cache_c, cache_p, export, consumer, producer",
    "memory first": "del kv_p, kv_c, pool_p, pool_c; gc.collect(); transfer.wait(60)",
    "caches before their transfer": "del cache_p, cache_c, kv_p, kv_c; gc.collect(); transfer.wait(60); del transfer",
    "closed while it runs": "producer.close(); consumer.close()",
    "closed twice, used after": "consumer.close(); consumer.close(); transfer.poll(); peer.alive; export.state",
    "kept in a module": "sys.modules['kept'] = (producer, consumer, transfer)",
    "kept in a cycle": "cycle = [producer, transfer, kv_p]; cycle.append(cycle); del cycle",
    "an exit in the middle": "sys.exit(0)",
    "a thread that waits": "import threading; threading.Thread(target=lambda: export.wait(), daemon=True).start()",
    "atexit uses it": "import atexit; atexit.register(lambda: (transfer.poll(), consumer.close()))",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("transport", ["inproc", "shm", "cma", "tcp"])
def test_exit_code_is_zero(transport, order):
    script = SETUP + ORDERS[order]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script, transport], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_exception_leaves_the_with_block_and_the_process():
    script = "import pdkv\nwith pdkv.Engine('a') as e: raise KeyError('mine')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'mine'")


def test_a_forked_child_can_exit_and_its_parent_goes_on():
    script = (
        SETUP
        + """
import os
transfer.wait(60)
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert peer.alive
    cache_c.pull(cache_p.export(range(8)).reference, into=range(8)).wait(60)
else:
    consumer.close()
"""
    )
    for transport in ("shm", "tcp"):
        # From 3.12 on Python warns whoever forks with threads.
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, transport]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert (done.returncode, done.stderr) == (0, "")
