"""Two network namespaces joined by a virtual cable, and a process in each that shares nothing else with the other.

The processes have PID and IPC namespaces of their own too, unless a test says otherwise, and no loopback: neither
can name the other's memory, so what arrives came over the cable, whose counters say how much that was.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

GUARD_S = 200.0
_NUMBERS = count()
_TOOLS = ("ip", "unshare")


@dataclass(frozen=True)
class End:
    """One end of the cable."""

    namespace: str
    device: str
    address: str

    def received_bytes(self) -> int:
        """Bytes that came in over the cable so far, as the kernel counts them."""
        told = ip("-n", self.namespace, "-s", "-j", "link", "show", "dev", self.device)
        return int(json.loads(told)[0]["stats64"]["rx"]["bytes"])


def why_not() -> str | None:
    """Says why there can be no namespaces here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"`{missing[0]}` is missing: make ucx"
    try:
        with cable():
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces are refused here: {error.stderr.strip()}"


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=GUARD_S).stdout


@contextmanager
def cable() -> Iterator[tuple[End, End]]:
    """Lays a cable; the namespaces and with them the cable go when the context ends, whatever happened."""
    number = next(_NUMBERS)
    names = [f"pdkv-{os.getpid()}-{number}{side}" for side in "ab"]
    ends = (End(names[0], "cable", "10.213.7.1"), End(names[1], "cable", "10.213.7.2"))
    try:
        for end in ends:
            ip("netns", "add", end.namespace)
        there = ("peer", "name", ends[1].device, "netns", ends[1].namespace)
        ip("-n", ends[0].namespace, "link", "add", ends[0].device, "type", "veth", *there)
        for end in ends:
            ip("-n", end.namespace, "address", "add", f"{end.address}/24", "dev", end.device)
            ip("-n", end.namespace, "link", "set", end.device, "up")
        yield ends
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


class Far:
    """An engine in a namespace. Calls go to the methods of `far_end.FarEnd` over there, as lines of JSON."""

    def __init__(self, end: End, *, alone: bool, **settings: Any) -> None:
        tests = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--ipc", "--mount-proc"] if alone else []
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", end.namespace, *apart, sys.executable, "-m", "netns.far_end"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.address = self.do("start", listen=f"{end.address}:0", **settings)
        except BaseException:
            self.close()
            raise

    def do(self, call: str, **arguments: Any) -> Any:
        """Calls and waits; what it raised over there is raised here."""
        self.process.stdin.write(json.dumps([call, arguments]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait(GUARD_S)}"
        well, answer = json.loads(line)
        assert well, answer
        return answer

    def close(self) -> None:
        """Lets it end, and ends it if it doesn't."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(GUARD_S)
        self.process.stdout.close()
