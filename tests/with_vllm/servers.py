"""vLLM's OpenAI servers and what stands in front of them, as processes that these tests start and end.

Each has a session of its own, so ending it ends what it started and nothing else. Knows nothing of requests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress

from with_vllm import forks, settings
from with_vllm.ports import free_port, until_free

# A server is up in half a minute; several at once, on a machine that does much else, may take this long.
START_S = 900
API_SERVER = "vllm.entrypoints.openai.api_server"


class Program:
    """A program that serves HTTP at `url`. Several start at the same time if `wait` is called after all began."""

    def __init__(self, name, folder, command, port, *, environment=None, health="/health"):
        self.name, self.command, self.port = name, command, port
        self.log = folder / f"{name}.log"
        self.url = f"http://127.0.0.1:{port}"
        self._health = health
        self._environment = environment or {}
        self.start()

    def start(self):
        """Starts the program, again if it has ended, at the same port; its log goes on."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=os.environ | settings.ENVIRONMENT | self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout_s=START_S):
        """Waits until the program says that it is well."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                code = self.process.returncode
                raise AssertionError(f"`{self.name}` ended with {code}; its log ends:\n{self.tail()}")
            if self.is_well():
                return self
            time.sleep(0.2)
        raise AssertionError(f"`{self.name}` isn't up after {timeout_s} s; its log ends:\n{self.tail()}")

    def is_well(self):
        try:
            with urllib.request.urlopen(self.url + self._health, timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def tail(self, lines=60):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self):
        """As `kill -9` of the program and of all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not have come to its session
        self.process.wait(120)
        # A child that inherited the listening socket may take longer to die, and whoever starts anew wants the port.
        until_free(self.port)

    def stop(self):
        """Ends the program as an operator would, and whatever that leaves behind. Says whether it ended by itself."""
        self.process.terminate()
        try:
            self.process.wait(100)
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.kill()


class Server(Program):
    """An OpenAI server of vLLM with one engine, which may prefill, decode, or do both without a connector."""

    def __init__(self, name, folder, model, *, transfer=None, environment=None, arguments=()):
        port = free_port()
        command = [
            sys.executable,
            "-m",
            API_SERVER,
            *("--model", str(model), "--served-model-name", "model"),
            *("--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"),
            *("--dtype", "float32", "--seed", "0", "--enforce-eager"),
            *("--distributed-executor-backend", "uni"),
            *("--block-size", str(settings.BLOCK_TOKENS)),
            *arguments,
        ]
        if transfer:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        super().__init__(name, folder, command, port, environment=settings.side_channel() | (environment or {}))


class ForkedServer(Server):
    """The same, up within some seconds: it is forked from a process that has imported vLLM, and so is its engine."""

    def start(self):
        module, arguments = "with_vllm.server_process", self.command[self.command.index(API_SERVER) + 1 :]
        process = forks.start(self.name, module, (arguments,), environment=self._environment, log=self.log)
        self.process = _Forked(process)


class _Forked:
    """A forked process with as much of the face of `subprocess.Popen` as programs need."""

    def __init__(self, process):
        self._process = process
        self.pid, self.terminate, self.kill = process.pid, process.terminate, process.kill

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout_s):
        self._process.join(timeout_s)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout_s)
