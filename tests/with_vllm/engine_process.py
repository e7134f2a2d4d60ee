"""One vLLM engine in a process of its own, driven through a pipe by `with_vllm.engines`.

The process that all engines are forked from imports this module, so vLLM is imported once for all of them. Steps the
engine while it has work and reads commands between steps. Knows nothing of prefill, decode or connectors.
"""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path

import numpy as np
import vllm.model_executor.models.gemma3
import vllm.model_executor.models.llama
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401 - these four are what the first engine would import by itself
from PIL import Image
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from with_vllm.answers import Answer, Choice
from with_vllm.models import PICTURE

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
        self.computed = self.prefilled = self.guessed = self.right = 0
        self.adapters = {}
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
            for request_id, tokens in output.num_scheduled_tokens.items():
                request = scheduler.requests[request_id]
                before = request.num_computed_tokens - tokens
                self.prefilled += max(0, min(request.num_computed_tokens, request.num_prompt_tokens) - before)
            return output

        update = scheduler.update_from_output

        def counted_update(output, found):
            for request_id, guesses in output.scheduled_spec_decode_tokens.items():
                self.guessed += len(guesses)
                self.right += len(found.sampled_token_ids[found.req_id_to_index[request_id]]) - 1
            return update(output, found)

        scheduler._preempt_request, scheduler.schedule = counted_preempt, counted_schedule
        scheduler.update_from_output = counted_update

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

    def do_add(self, request_id, prompt, sampling, params, adapter=None, picture=None):
        extra = {"kv_transfer_params": params} if params is not None else None
        whole = SamplingParams(**sampling, extra_args=extra, output_kind=RequestOutputKind.FINAL_ONLY)
        lora = None if adapter is None else self._adapter(adapter)
        asked = {"prompt_token_ids": prompt}
        if picture is not None:
            asked["multi_modal_data"] = {"image": _picture(picture)}
        self.engine.add_request(request_id, asked, whole, lora_request=lora)

    def _adapter(self, folder):
        """The adapter of a folder, under the folder's name. Their numbers are this engine's own."""
        name = Path(folder).name
        number = self.adapters.setdefault(name, len(self.adapters) + 1)
        return LoRARequest(name, number, folder)

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

    def do_prefilled(self):
        """How many tokens of prompts the model has seen."""
        return self.prefilled

    def do_guessed(self):
        """How many tokens were guessed ahead, and how many of them were right."""
        return self.guessed, self.right

    def do_reset_prefix_cache(self):
        return self.engine.reset_prefix_cache()

    def do_run(self, module, function, **arguments):
        """Calls a function of any module with this and the arguments: for what only one caller wants to know."""
        return getattr(importlib.import_module(module), function)(self, **arguments)

    def do_fill_kv(self, value):
        """Overwrites the whole KV cache, of engines with one worker."""
        for cache in self.engine.model_executor.driver_worker.worker.model_runner.kv_caches:
            cache.fill_(value)

    def do_fill_kv_of(self, rank, value):
        """The same for one of several workers."""
        self.engine.collective_rpc(_fill, args=(rank, value))


def main(settings, pipe):
    """Builds an engine from the settings, says so through the pipe, and serves it until the other end closes."""
    Host(settings, pipe).run()


def _picture(seed):
    """A picture of noise."""
    points = np.random.default_rng(seed).integers(0, 256, (PICTURE, PICTURE, 3), dtype=np.uint8)
    return Image.fromarray(points)


def _fill(worker, rank, value):
    if worker.rank == rank:
        for cache in worker.model_runner.kv_caches:
            cache.fill_(value)
