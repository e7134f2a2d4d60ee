"""A producer in a process of its own, and what a test asks of it and does to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from connectors.sides import PATIENCE_S, Producing, until
from pdkv.connectors.core.work import ExportOrder, ProducerAddress, Work


class Far:
    """The test's end."""

    def __init__(self, **how):
        folder = Path(__file__).parents[1]
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.child = subprocess.Popen(
            [sys.executable, "-m", "connectors.far", json.dumps(how)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        engine_id, self.port, self.engine, self.incarnation = self.answer()
        self.address = ProducerAddress(engine_id, "127.0.0.1", self.port)

    def answer(self):
        line = self.child.stdout.readline()
        assert line, "the producer ended"
        return json.loads(line)

    def ask(self, what, *args):
        self.child.stdin.write(json.dumps([what, *args]) + "\n")
        self.child.stdin.flush()
        return self.answer()

    def export(self, request_id, *block_ids, lease_s=60.0):
        references, value = self.ask("export", request_id, block_ids, lease_s)
        return tuple(map(tuple, references)), value

    def mint(self, *block_ids):
        return tuple(map(tuple, self.ask("mint", block_ids)))

    def order(self, request_id, references, *block_ids, lease_s=60.0):
        return self.ask("order", request_id, references, block_ids, lease_s)

    def sent(self):
        return self.ask("sent")

    def until_sent(self, *request_ids):
        until(lambda: set(request_ids) <= set(self.sent()), f"the end of {request_ids}")

    def stop(self):
        """Returns when every thread of it has stopped."""
        os.kill(self.child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.child.pid, os.WSTOPPED)

    def go_on(self):
        os.kill(self.child.pid, signal.SIGCONT)

    def kill(self):
        self.child.kill()
        self.child.wait(PATIENCE_S)


@contextmanager
def far(**how):
    side = Far(**how)
    try:
        yield side
    finally:
        side.kill()
        side.child.stdin.close()
        side.child.stdout.close()


def _serve():
    side = Producing(**json.loads(sys.argv[1]))
    info = side.worker.info
    _say([side.engine_id, side.directory.port, info.address, info.incarnation])
    for line in sys.stdin:
        what, *args = json.loads(line)
        _say(_carry_out(side, what, *args))
    side.close()


def _say(value):
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _carry_out(side, what, *args):
    if what == "export":
        request_id, block_ids, lease_s = args
        return side.export(request_id, *map(tuple, block_ids), lease_s=lease_s)
    if what == "mint":
        return side.mint(args[0])
    if what == "order":
        request_id, references, block_ids, lease_s = args
        references, block_ids = tuple(map(tuple, references)), tuple(map(tuple, block_ids))
        side.worker.carry(Work(exports=(ExportOrder(request_id, references, block_ids, lease_s),)))
        return None
    if what == "sent":
        side.look()
        return side.sent
    assert what == "stats"
    return {**side.worker._engine.stats, **side.counts()}


if __name__ == "__main__":
    _serve()
