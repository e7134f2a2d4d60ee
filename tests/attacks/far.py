"""A test's hold on an engine in another process: calls it, kills it, stops it, goes on with it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GUARD_S = 200.0  # only a hang takes so long


def until(condition: Callable[[], Any], what: str, guard_s: float = GUARD_S) -> Any:
    """Waits for something that must come; how soon is not judged."""
    deadline = time.monotonic() + guard_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.005)


class Zygote:
    """The process that forks all others."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        tests = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "attacks.zygote", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        )
        theirs.close()
        self.requests = ours

    def fork(self) -> tuple[int, Connection]:
        """Starts a process; returns its id and the channel to it."""
        ours, theirs = socket.socketpair()
        socket.send_fds(self.requests, [b"!"], [theirs.fileno()])
        theirs.close()
        pid = int.from_bytes(self.requests.recv(4), "little")
        assert pid, "the zygote died"
        return pid, Connection(ours.detach())

    def close(self) -> None:
        """Ends it; its children end by themselves when their tests hang up."""
        self.requests.close()
        self.process.wait(GUARD_S)


class Far:
    """An engine in a process of its own. Calls go to the methods of `Host` over there."""

    def __init__(self, zygote: Zygote, **settings: Any) -> None:
        self.pid, self.channel = zygote.fork()
        self.pidfd = os.pidfd_open(self.pid)
        self.do("start", **settings)
        self.address: str = self.do("address")

    def post(self, call: str, *arguments: Any, **keywords: Any) -> None:
        """Sends a call; `result` gets its answer."""
        self.channel.send((call, arguments, keywords))

    def result(self, guard_s: float = GUARD_S) -> Any:
        """The answer of the oldest posted call; what it raised is raised here."""
        assert self.channel.poll(guard_s), f"process {self.pid} hangs"
        well, answer = self.channel.recv()
        if well:
            return answer
        raise answer

    def do(self, call: str, *arguments: Any, **keywords: Any) -> Any:
        """Calls and waits."""
        self.post(call, *arguments, **keywords)
        return self.result()

    def signal(self, number: int) -> None:
        """Sends a signal to that very process, whatever its number is by now."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            assert number in (signal.SIGKILL, signal.SIGCONT)

    def kill(self) -> None:
        """Kills it; returns when it is gone."""
        self.signal(signal.SIGKILL)
        self.wait_gone()

    def wait_gone(self) -> None:
        """Waits for its end, whoever brings it about."""
        end = select.poll()  # `select` knows no descriptor above 1,023, and some tests open more
        end.register(self.pidfd, select.POLLIN)
        assert end.poll(1000 * GUARD_S), f"process {self.pid} lives"

    def stop(self) -> None:
        """Stops every thread of it; returns when they have stopped."""
        self.signal(signal.SIGSTOP)
        until(self.stopped, "the stop")

    def stopped(self) -> bool:
        """Whether all its threads are stopped."""
        stats = (task / "stat" for task in Path(f"/proc/{self.pid}/task").iterdir())
        try:
            return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)
        except (FileNotFoundError, ProcessLookupError):
            return False  # one was just ending

    def go_on(self) -> None:
        """Lets it run again."""
        self.signal(signal.SIGCONT)

    def close(self) -> None:
        """Kills it, in whatever state it is."""
        self.kill()
        os.close(self.pidfd)
        self.channel.close()
