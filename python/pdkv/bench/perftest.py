"""UCX's own benchmark, `ucx_perftest`, as a row: two processes of it on loopback, one message per block.

Knows the program's options and output, no engine. What it does differently from any cache: it moves one and
the same block again and again, which stays in the processor's cache, and checks no byte.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pdkv import wheels
from pdkv.errors import PdkvError, UnsupportedError

_MIB = 1 << 20
_WARMUP = 64
_STARTS_S = 20.0
_PORTS = 3
_DEFAULT_TLS = "^tcp"  # pdkv's for memory of the host, see docs/decisions/0010
_FIELDS = ("iterations", "avg_bw", "overall_bw", "overall_mr")
_HINT = "install it: `apt-get install ucx-utils` on Debian and Ubuntu; the `libucx` wheels have one too"


@dataclass(frozen=True, slots=True)
class Tool:
    """One copy of the program, with what it needs around it to run with its own libraries."""

    path: Path
    version: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """What one run of the program says at its end."""

    messages: int
    bytes_per_s: float


def find(version: str, library: Path | None = None) -> Tool:
    """Finds the program of a version; if there is none of it, the newest there is.

    Args:
        version: The version of UCX that pdkv uses.
        library: The `libucp` that was asked for, if one was.

    Raises:
        UnsupportedError: There is none; the hint says what to install.
    """
    libraries = [library.parent] if library is not None else []
    libraries += [Path(folder) for origin, folder in wheels.folders() if origin == "libucx wheel"]
    tools = [tool for folder in libraries if (tool := _of_wheel(folder)) is not None]
    if (found := shutil.which("ucx_perftest")) is not None:
        tools.append(Tool(Path(found), _version(Path(found).with_name("ucx_info"), {})))
    if not tools:
        raise UnsupportedError("`ucx_perftest` is not on this machine", hint=_HINT)
    return max(
        tools, key=lambda tool: (tool.version == version, [int(part) for part in tool.version.split(".") if part])
    )


def _of_wheel(libraries: Path) -> Tool | None:
    """Gives the program of a `libucx` wheel: it is in `bin` and does not know that its libraries are in `lib`."""
    program = libraries.parent / "bin" / "ucx_perftest"
    if not program.is_file() or libraries.parts[-2:] != ("libucx", "lib"):
        return None
    environment = {"LD_LIBRARY_PATH": str(libraries)}
    return Tool(program, _version(program.with_name("ucx_info"), environment), environment)


def _version(info: Path, environment: Mapping[str, str]) -> str:
    """Asks a copy's `ucx_info` for its version; empty where that doesn't work."""
    try:
        told = subprocess.run(
            [info, "-v"], env={**os.environ, **environment}, capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"[Vv]ersion:? (\d+\.\d+\.\d+)", told)
    return found[1] if found else ""


def parse(text: str) -> Result:
    """Reads the program's output of `-f -v`: a line of names, a line of numbers.

    Raises:
        PdkvError: That is not what the program wrote; the message shows what it was.
    """
    lines = [line.strip() for line in text.splitlines()]
    for head, values in itertools.pairwise(lines):
        names = head.split(",")
        if not set(_FIELDS) <= set(names):
            continue
        numbers = values.split(",")
        if len(numbers) == len(names):
            named = dict(zip(names, numbers, strict=True))
            with contextlib.suppress(ValueError):
                return Result(int(named["iterations"]), float(named["overall_bw"]) * _MIB)
    raise PdkvError(f"`ucx_perftest` gave no result: {_complaint(text)}")


def _complaint(text: str) -> str:
    """Finds what the program complained about in what it wrote, without its prefixes."""
    complaints = [line.partition("ERROR")[2].strip() for line in text.splitlines() if " ERROR " in line]
    rest = [line.strip() for line in text.splitlines() if line.strip()]
    return complaints[0] if complaints else rest[-1][:200] if rest else "it wrote nothing"


def arguments(test: str, message_bytes: int, messages: int, window: int) -> list[str]:
    """Writes the options of a run: registered memory, contexts with wake-up as pdkv's, a window, numbers only."""
    sizes = ["-s", str(message_bytes), "-n", str(messages), "-w", str(min(_WARMUP, messages)), "-O", str(window)]
    return ["-t", test, *sizes, "-z", "-I", "-f", "-v"]


def settings(given: Mapping[str, str]) -> dict[str, str]:
    """Writes UCX's settings as the environment of a run.

    Its buffers are made what a KV cache is: memory of the process's own that somebody has written to. Left alone it
    takes shared memory and measures the copy inside one process; and of private memory that nobody has written to,
    all pages are the kernel's one page of zeros, which a get then reads again and again, faster than any memory.
    The program fills no buffer by itself, but the C library fills what comes from its heap when asked to.
    """
    ours = {"UCX_ALLOC_PRIO": "heap", "MALLOC_PERTURB_": "1", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    if "UCX_TLS" not in os.environ:
        ours["UCX_TLS"] = _DEFAULT_TLS
    return ours | {f"UCX_{key}": value for key, value in given.items()}


def run(
    tool: Tool, test: str, message_bytes: int, messages: int, window: int, given: Mapping[str, str], timeout_s: float
) -> Result:
    """Runs the program once against itself over loopback.

    Args:
        tool: Which copy.
        test: The program's name for what to do, such as `ucp_put_bw`.
        message_bytes: Bytes of a message.
        messages: How many.
        window: Most messages under way.
        given: UCX settings without their prefix, such as `{"TLS": "tcp"}`.
        timeout_s: Deadline.

    Raises:
        PdkvError: It failed or took too long; the message is its own.
    """
    environment = {**os.environ, **settings(given), **tool.environment}
    with _server(tool, environment) as port:
        command = [str(tool.path), "127.0.0.1", "-p", str(port), *arguments(test, message_bytes, messages, window)]
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise PdkvError(f"`ucx_perftest` did not end within `{timeout_s:g}` s") from error
    return parse(done.stdout)


@contextmanager
def _server(tool: Tool, environment: Mapping[str, str]) -> Iterator[int]:
    """Runs the passive process on a free port, until it has served one run or the context ends.

    Raises:
        PdkvError: It does not listen.
    """
    for _ in range(_PORTS):
        # Free now; somebody may take it before the program does, which then ends.
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        server = subprocess.Popen(
            [tool.path, "-p", str(port), "-I"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            if _await_listener(server, port):
                yield port
                return
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=1)
            if server.poll() is None:
                server.kill()
                server.wait()
    raise PdkvError(f"the server of `ucx_perftest` does not listen, the last of `{_PORTS}` ports was `{port}`")


def _await_listener(server: subprocess.Popen[bytes], port: int) -> bool:
    """Waits until the server listens. It serves the first connection it gets: trying to connect is no way to ask."""
    end = time.monotonic() + _STARTS_S
    while server.poll() is None and time.monotonic() < end:
        if _listens(port):
            return True
        time.sleep(0.005)
    return False


def _listens(port: int) -> bool:
    """Says whether some process of this host listens on a TCP port, from the kernel's table."""
    wanted = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if local.endswith(wanted) and state == "0A":
                    return True
    return False
