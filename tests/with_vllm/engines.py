"""Engines of vLLM in processes of their own, and pairs of them: one prefills, the other decodes.

Cheaper than servers by the time that they take to start, and open to looks inside: free blocks, states, single steps.
Imports neither vLLM nor torch into the process that runs the tests. Knows connectors as settings only.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from with_vllm import forks, settings

# An engine is built in a few seconds; on a machine that does much else it may take this long. The same for an answer.
START_S = 900
ANSWER_S = 600

# What a router asks of the engine that prefills, and what it gets back goes to the one that decodes.
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Engine:
    """One engine. What a command raises there is told here, and so is the end of its log when it has died."""

    def __init__(self, name, folder, model, *, environment=None, **overrides):
        self.name = name
        self.log = folder / f"{name}.log"
        self._numbers = itertools.count()
        self._answers = {}
        self._pipe, theirs = multiprocessing.Pipe()
        arguments = (settings.engine(model, **overrides), theirs)
        self.process = forks.start(
            name, "with_vllm.engine_process", arguments, environment=environment or {}, log=self.log
        )
        theirs.close()
        self._started = False

    def wait_until_started(self):
        """Waits for the engine to be built; several are built at the same time if this is called after all began."""
        if not self._started:
            self._result(START_S)
            self._started = True
        return self

    def _receive(self, deadline):
        if not self._pipe.poll(max(0, deadline - time.monotonic())):
            raise AssertionError(f"engine `{self.name}` didn't answer in time; its log ends:\n{self.tail()}")
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join(10)
            raise AssertionError(
                f"engine `{self.name}` ended with {self.process.exitcode}; its log ends:\n{self.tail()}"
            ) from None

    def _result(self, timeout_s):
        deadline = time.monotonic() + timeout_s
        while True:
            kind, value = self._receive(deadline)
            if kind == "result":
                return value
            assert kind == "answer", value
            self._keep(value)

    def _keep(self, value):
        request_id, answer = value
        self._answers[request_id] = answer

    def call(self, command, **arguments):
        """Runs a command of `engine_process.Host` between two steps of the engine and returns what it returns."""
        self.wait_until_started()
        self._pipe.send((command, arguments))
        return self._result(ANSWER_S)

    def send(self, prompt, *, params=None, request_id=None, adapter=None, picture=None, **sampling):
        """Adds a request, greedy unless told, and returns its id; `wait` has the answer.

        `adapter` is the folder of a LoRA, and `picture` the number of a picture that is put before the prompt.
        """
        request_id = request_id or f"{self.name}-{next(self._numbers)}"
        sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 1} | sampling
        arguments = {"prompt": list(prompt), "sampling": sampling, "params": params}
        self.call("add", request_id=request_id, adapter=adapter, picture=picture, **arguments)
        return request_id

    def wait(self, request_id, timeout_s=ANSWER_S):
        deadline = time.monotonic() + timeout_s
        while request_id not in self._answers:
            kind, value = self._receive(deadline)
            assert kind == "answer", (kind, value)
            self._keep(value)
        return self._answers.pop(request_id)

    def has(self, request_id):
        """Whether the answer has come."""
        while self._pipe.poll():
            self._keep(self._receive(time.monotonic())[1])
        return request_id in self._answers

    def ask(self, prompt, **arguments):
        return self.wait(self.send(prompt, **arguments))

    def wait_until_idle(self, timeout_s=ANSWER_S):
        """Waits until the engine has no request and keeps no blocks for anybody."""
        deadline = time.monotonic() + timeout_s
        while self.call("busy"):
            states = self.call("states", request_id="")
            assert time.monotonic() < deadline, f"engine `{self.name}` is still busy: {states}"
            time.sleep(0.01)

    @contextmanager
    def by_hand(self):
        """Until the end of the block the engine steps only when told to: `engine.call("step")`."""
        self.call("by_hand", by_hand=True)
        try:
            yield
        finally:
            if self.process.is_alive():
                self.call("by_hand", by_hand=False)

    def tail(self, lines=40):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else "(none)"

    def kill(self):
        """As `kill -9` does."""
        self.process.kill()
        self.process.join(10)

    def close(self):
        """Ends the engine in good order, and reports one that had to be killed."""
        if self.process.is_alive():
            with suppress(OSError):
                self._pipe.send(("close", {}))
            self.process.join(ANSWER_S)
        in_order = not self.process.is_alive()
        self.kill()
        self._pipe.close()
        return in_order


class Pair:
    """An engine that prefills and one that decodes. The latter, asked without parameters, is its own reference.

    `extra` are settings of the connector; `prefill` and `decode` are arguments of one engine, with `extra` of its own.
    """

    def __init__(
        self, name, folder, model, connector, *, policy="fail", extra=None, prefill=None, decode=None, **common
    ):
        def build(role, overrides):
            own = overrides.pop("extra", {})
            config = settings.transfer(connector, f"kv_{role}", policy=policy, **(extra or {}) | own)
            arguments = {"model": model, "environment": settings.side_channel(), "transfer": config}
            return Engine(f"{name}-{role}", folder, **(arguments | common | overrides))

        self._build = build
        self.prefill = build("producer", prefill or {})
        self.decode = build("consumer", decode or {})

    def replace_prefill(self, **overrides):
        """Starts another engine in place of the one that prefills, which is gone."""
        self.prefill.kill()
        self.prefill = self._build("producer", overrides)

    def hand_over(self, prompt, **arguments):
        """Prefills the prompt and returns the parameters for who decodes it."""
        answer = self.prefill.ask(prompt, params=dict(ASK), **({"max_tokens": 1} | arguments))
        return answer.params

    def ask(self, prompt, **arguments):
        """What a router does: prefill on the one, the rest on the other."""
        return self.decode.ask(prompt, params=self.hand_over(prompt), **arguments)

    def ask_all(self, prompts, **arguments):
        """The same for many at once: each is decoded as soon as it is prefilled."""
        asked = [self.prefill.send(prompt, params=dict(ASK), max_tokens=1) for prompt in prompts]
        sent = []
        for prompt, request_id in zip(prompts, asked, strict=True):
            sent.append(self.decode.send(prompt, params=self.prefill.wait(request_id).params, **arguments))
        return [self.decode.wait(request_id) for request_id in sent]

    def alone(self, prompt, **arguments):
        """What the decoding engine answers when it does all by itself, with nothing cached before or after."""
        self.forget()
        answer = self.decode.ask(prompt, **arguments)
        self.forget()
        return answer

    def forget(self):
        """Empties both prefix caches, once nobody uses a block."""
        for engine in (self.prefill, self.decode):
            engine.wait_until_idle()
            assert engine.call("reset_prefix_cache")

    def free_blocks(self):
        return [engine.call("free_blocks") for engine in (self.prefill, self.decode)]

    def close(self):
        """Ends both, and says whether both did so by themselves."""
        with ThreadPoolExecutor(2) as pool:
            return all(list(pool.map(Engine.close, (self.prefill, self.decode))))
