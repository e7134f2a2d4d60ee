"""One vLLM engine in a process of its own, driven through a pipe by `with_vllm.engines`.

The process that all engines are forked from imports this module, so vLLM is imported once for all of them. Steps the
engine while it has work and reads commands between steps. Knows nothing of prefill, decode or connectors.
"""

from __future__ import annotations

import importlib
import os
import traceback

import vllm.model_executor.models.gemma3
import vllm.model_executor.models.llama
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401 - these four are what the first engine would import by itself
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from with_vllm.answers import Answer, Choice

# Between two steps of an engine that only keeps blocks for somebody, in seconds. vLLM itself doesn't wait; on CPUs that
# several engines share it is better to.
PAUSE_S = 0.001


class Host:
    """The engine and the commands it answers to: each `do_` method is one, by name."""

    def __init__(self, settings, pipe):
        self.pipe = pipe
        self.engine = LLMEngine.from_engine_args(EngineArgs(**settings))
        self.core = self.engine.engine_core.engine_core
        self.by_hand = False
        self.preemptions = 0
        self.computed = 0
        self._count()
        pipe.send(("result", os.getpid()))

    def _count(self):
        """Has the scheduler count what no answer tells."""
        scheduler = self.core.scheduler
        preempt, schedule = scheduler._preempt_request, scheduler.schedule

        def counted_preempt(*arguments, **named):
            self.preemptions += 1
            return preempt(*arguments, **named)

        def counted_schedule(*arguments, **named):
            output = schedule(*arguments, **named)
            self.computed += output.total_num_scheduled_tokens
            return output

        scheduler._preempt_request, scheduler.schedule = counted_preempt, counted_schedule

    def run(self):
        while True:
            stepping = not self.by_hand and self.do_busy()
            idle = stepping and not self.engine.has_unfinished_requests()
            if self.pipe.poll((PAUSE_S if idle else 0) if stepping else None):
                command, arguments = self.pipe.recv()
                if command == "close":
                    self.engine.engine_core.shutdown()
                    return
                try:
                    result = "result", getattr(self, f"do_{command}")(**arguments)
                except Exception:  # noqa: BLE001 - told to whoever commanded it
                    result = "error", traceback.format_exc()
                self.pipe.send(result)
            elif stepping:
                self.do_step()

    def do_add(self, request_id, prompt, sampling, params):
        extra = {"kv_transfer_params": params} if params is not None else None
        whole = SamplingParams(**sampling, extra_args=extra, output_kind=RequestOutputKind.FINAL_ONLY)
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, whole)

    def do_abort(self, request_id):
        self.engine.abort_request([request_id])

    def do_by_hand(self, by_hand):
        self.by_hand = by_hand

    def do_step(self):
        for output in self.engine.step():
            if output.finished:
                choices = [self._choice(sequence) for sequence in output.outputs]
                answer = Answer(choices, output.kv_transfer_params)
                self.pipe.send(("answer", (output.request_id, answer)))
        return self.do_busy()

    @staticmethod
    def _choice(sequence):
        tops = zip(sequence.token_ids, sequence.logprobs or (), strict=True)
        logprobs = [top[token].logprob for token, top in tops]
        return Choice(list(sequence.token_ids), logprobs, sequence.finish_reason)

    def do_busy(self):
        """Whether the engine has anything to step for: requests, or blocks that it keeps for somebody."""
        return bool(
            self.engine.has_unfinished_requests() or self.core.scheduler.has_requests() or self.core.batch_queue
        )

    def do_states(self, request_id):
        """The scheduler's names for the states of the request, one for each of its sequences that is there."""
        requests = self.core.scheduler.requests
        return [requests[key].status.name for key in sorted(requests) if request_id in key]

    def do_free_blocks(self):
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def do_preemptions(self):
        """How often a request lost its blocks to another."""
        return self.preemptions

    def do_computed(self):
        """How many tokens the model has seen: of prompts, and those that it made and went on from."""
        return self.computed

    def do_reset_prefix_cache(self):
        return self.engine.reset_prefix_cache()

    def do_run(self, module, function, **arguments):
        """Calls a function of any module with this and the arguments: for what only one caller wants to know."""
        return getattr(importlib.import_module(module), function)(self, **arguments)

    def do_fill_kv(self, value):
        """Overwrites the whole KV cache, of engines with one worker."""
        for cache in self.engine.model_executor.driver_worker.worker.model_runner.kv_caches:
            cache.fill_(value)
