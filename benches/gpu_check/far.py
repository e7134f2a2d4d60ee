"""The other end of a transfer: an engine with some memory, that does what it is asked.

Used as an object in the same process, or as a process: `python -m gpu_check.far`, a line of JSON for each request and
each answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pdkv
from gpu_check.arena import open_arena
from gpu_check.caches import Geometry
from gpu_check.store import Store

_MARK = "gpu-check "
# Over what `ucx` may put and get, at both ends. A dry run says `any`: then UCX emulates the adapter that isn't here.
UCX_POLICY = "GPU_CHECK_UCX_POLICY"


def start_engine(name: str, transport: str) -> pdkv.Engine:
    """Starts the engine of an end; to be tried within one host `ucx` must be named."""
    if transport != "ucx":
        return pdkv.Engine(name)
    policy = os.environ.get(UCX_POLICY, "rdma")
    return pdkv.Engine(name, transports=["ucx", "tcp"], ucx=pdkv.UcxConfig(one_sided=policy))


class Other(Protocol):
    """Answers requests."""

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Puts a request; gives the answer.

        Raises:
            RuntimeError: The other end failed; the text is its error.
        """


def digest(content: Any) -> str:
    """Names bytes."""
    return hashlib.sha256(content.tobytes()).hexdigest()


class Far:
    """The other end itself."""

    def __init__(self) -> None:
        """Starts with nothing open."""
        self._arena = open_arena()
        self._engine: pdkv.Engine | None = None
        self._store: Store | None = None
        self._cache: Any = None
        self._export: Any = None

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Does what is asked."""
        if do in ("export", "offer"):
            return self._publish(do, **request)
        doing: dict[str, Callable[..., dict[str, Any]]] = {
            "open": self._open,
            "digest": self._digest,
            "fill": self._fill,
            "close": self._close,
        }
        return doing[do](**request)

    def _open(
        self, *, geometry: Mapping[str, Any], kind: str, seed: int, device: int, transport: str
    ) -> dict[str, Any]:
        self._close()
        shape = Geometry(**geometry)
        self._store = Store(self._arena, kind, shape.nbytes, device)
        self._store.put(self._arena.random(shape.nbytes, seed))
        self._engine = start_engine("far", transport)
        region = self._engine.register(self._store.owner)
        self._cache = self._engine.register_kv_cache(
            self._store.tensors(shape), layout="BHNC", block_tokens=shape.tokens, model="check"
        )
        return {"address": self._engine.address, "region": region.describe().to_json()}

    def _fill(self, *, seed: int) -> dict[str, Any]:
        assert self._store is not None
        self._store.put(self._arena.random(self._store.nbytes, seed))
        return {}

    def _publish(self, do: str, *, blocks: list[int]) -> dict[str, Any]:
        if self._export is not None:
            self._export.release()
        self._export = self._cache.export(blocks) if do == "export" else self._cache.offer(blocks)
        return {"reference": self._export.reference.to_json()}

    def _digest(self) -> dict[str, Any]:
        assert self._store is not None
        return {"digest": digest(self._store.get())}

    def _close(self) -> dict[str, Any]:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._store = self._cache = self._export = None
        return {}


class FarProcess:
    """The other end as a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Talks to a process that `far_process` started."""
        self._process = process

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Sends the request and waits; the step's deadline is the only one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                if "error" in answer:
                    raise RuntimeError(f"the other process: {answer['error']}")
                return answer
        raise RuntimeError(f"the other process ended with {self._process.wait()}")


@contextmanager
def far_process(**environment: str) -> Iterator[FarProcess]:
    """Starts the other end; it ends with the context."""
    command = [sys.executable, "-m", __name__]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment, "PYTHONPATH": paths},
    ) as process:
        try:
            yield FarProcess(process)
            process.communicate(timeout=30)  # the end of its input is the end of it
        finally:
            process.kill()


def _serve() -> None:
    far = Far()
    for line in sys.stdin:
        try:
            answer = far.ask(**json.loads(line))
        except (pdkv.PdkvError, OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(_MARK + json.dumps(answer), flush=True)
    far.ask("close")


if __name__ == "__main__":
    _serve()
