"""Stands in for one vLLM engine around a connector: its scheduler, its block pool and its ranks.

Does with requests what vLLM's scheduler does with them, and asserts what it asserts. The order and the arguments of the
calls are those of a release's trace. A request that runs on KV of anything but its own prompt fails the test.
"""

from __future__ import annotations

import pickle
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

from connectors.gpu import Gpu
from connectors.llm_memory import BLOCK_TOKENS, NULL_BLOCK, NUM_BLOCKS, Rank, cache_config
from connectors.llm_requests import Blocks, Request, Status, engine_config
from connectors.replay import replay
from connectors.stand_in import Place


class Llm:
    """One vLLM engine of a release.

    Args:
        release: Whose calls to make.
        module: `pdkv.connectors.vllm`, imported with the release's stand-in.
        role: `kv_producer`, `kv_consumer` or `kv_both`.
        name: Its engine id.
        ranks: How many share the heads.
        groups: KV groups of the model. All but the first keep a window of one block.
        policy: What becomes of a request whose load failed: `fail` or `recompute`.
        sleep_mode: Whether it may give its memory back for a while.
        cumem: Whether its own allocator makes the cache on a GPU, unless the connector knows a better place.
        connector: The connector's class, if not the module's own.
        gpu: Where its cache is, unless it is the CPU's memory.
        indexer: Whether each layer has an indexer with a cache of its own, in the same KV group.
        **extra: `kv_connector_extra_config`.

    Attributes:
        pools: Where each rank is told to allocate its cache; `None` is vLLM's choice.
    """

    def __init__(
        self,
        release: str,
        module: ModuleType,
        role: str,
        *,
        name: str,
        ranks: int = 1,
        groups: int = 1,
        policy: str = "fail",
        sleep_mode: bool = False,
        cumem: bool = False,
        connector: Any = None,
        gpu: Gpu | None = None,
        indexer: bool = False,
        **extra: Any,
    ) -> None:
        self.release, self.policy, self.groups = release, policy, groups
        self.requests: dict[str, Request] = {}
        self.blocks: dict[str, list[list[int]]] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.free = list(range(1, NUM_BLOCKS))
        self.stats: Any = None
        self.defer_loads = False
        self.deferred: dict[str, int] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._finished: set[str] = set()
        self._missing: dict[str, Counter[str]] = {"sent": Counter(), "received": Counter()}
        self._failing: set[str] = set()
        config = engine_config(role, name, ranks, policy, sleep_mode, cumem, extra)
        caches = cache_config(groups, indexer)
        roles, connector = module.KVConnectorRole, connector or module.PdkvConnector
        self.ranks = [Rank(release, rank, groups, gpu, indexer) for rank in range(ranks)]
        self.workers, self.pools, handshakes = [], [], {}
        for rank in self.ranks:
            Place.tp_rank = rank.rank
            worker = connector(config, roles.WORKER, caches)
            self.workers.append(worker)
            gave = replay(release, "start_worker", worker, kv_caches=rank.layers, copy_operation=None)
            self.pools.append(gave.get("get_mem_pool_context"))
            handshakes[0, rank.rank] = pickle.loads(pickle.dumps(gave["get_handshake_metadata"]))
        self.scheduler = connector(config, roles.SCHEDULER, cache_config(groups, indexer, scheduler=True))
        manager = SimpleNamespace(block_pool=None)
        replay(release, "start_scheduler", self.scheduler, pool=None, manager=manager, handshakes=handshakes)

    def submit(self, request: Request) -> Request:
        """A request comes in."""
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        self.waiting.append(request)
        replay(self.release, "arrival", self.scheduler, request=request)
        return request

    def step(self) -> None:
        """Schedules, runs the model, and takes in what came of it."""
        for request in list(self.waiting):
            self._schedule(request)
        scheduled = list(self.running)
        output = SimpleNamespace(num_scheduled_tokens={request.request_id: 1 for request in scheduled})
        metadata = replay(self.release, "schedule", self.scheduler, scheduler_output=output)["build_connector_meta"]
        finished, self._finished = self._finished, set()
        self._update(self._work(metadata, scheduled, finished), scheduled)

    def abort(self, request: Request) -> None:
        """The client is gone."""
        self.finish(request, Status.FINISHED_ABORTED)

    def preempt(self, request: Request) -> None:
        """A running request makes room."""
        self.running.remove(request)
        self.waiting.insert(0, request)
        self._give_back(request)
        request.status, request.num_computed_tokens = Status.PREEMPTED, 0

    def finish(self, request: Request, status: Status) -> None:
        """A request is over."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        held = False
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            deferred = self.deferred.pop(request.request_id, None) is not None
            held = not deferred and request.request_id not in self._received
            self._received.discard(request.request_id)
            self._failed.discard(request.request_id)
        request.status = status
        ids = Blocks(self._window(request)).get_block_ids()
        gave = replay(self.release, "finish", self.scheduler, request=request, block_ids=ids)
        kept, request.answer = gave["request_finished_all_groups"]
        self._finished.add(request.request_id)
        if not (held or kept):
            self._forget(request)

    def stop(self) -> None:
        """Ends all its processes."""
        for connector in (*self.workers, self.scheduler):
            replay(self.release, "stop", connector)

    def _schedule(self, request: Request) -> None:
        if request.status is Status.WAITING_FOR_REMOTE_KVS and not self._promote(request):
            return
        external = 0
        if request.num_computed_tokens == 0:
            arguments = {"request": request, "num_computed_tokens": request.local_tokens}
            gave = replay(self.release, "match", self.scheduler, **arguments)
            external, loads = gave["get_num_new_matched_tokens"]
            if external is None:
                return
            assert external > 0 or not loads
            request.num_computed_tokens = request.local_tokens + external
            assert request.num_computed_tokens <= request.num_prompt_tokens
            if loads:
                self._load(request, external)
                return
        self._allocate(request, request.num_prompt_tokens)
        self._tell_allocation(request, external)
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING

    def _load(self, request: Request, external: int) -> None:
        replay(self.release, "loading", self.scheduler, request=request)
        self._allocate(request, request.num_computed_tokens)
        if self.defer_loads:
            self.deferred[request.request_id] = external
        else:
            self._tell_allocation(request, external)
        request.loads += 1
        request.status = Status.WAITING_FOR_REMOTE_KVS

    def drain_deferred_loads(self) -> None:
        """The steps that a load had to wait for are over."""
        for request_id, external in list(self.deferred.items()):
            del self.deferred[request_id]
            self._tell_allocation(self.requests[request_id], external)

    def _tell_allocation(self, request: Request, external: int) -> None:
        arguments = {"request": request, "num_external_tokens": external}
        replay(self.release, "allocation", self.scheduler, blocks=Blocks(self.blocks[request.request_id]), **arguments)
        if external:
            replay(self.release, "loaded", self.scheduler, **arguments)

    def _promote(self, request: Request) -> bool:
        if request.request_id not in self._received:
            return False
        self._received.remove(request.request_id)
        if request.request_id in self._failed:
            self._failed.remove(request.request_id)
            if request.num_computed_tokens == 0:
                self._give_back(request)
        elif request.num_computed_tokens == request.num_prompt_tokens:
            request.num_computed_tokens -= 1
        return True

    def _work(self, metadata: Any, scheduled: list[Request], finished: set[str]) -> SimpleNamespace:
        output = SimpleNamespace(
            finished_sending=set(), finished_recving=set(), failed_recving=set(), invalid_block_ids=set()
        )
        for rank, worker in zip(self.ranks, self.workers, strict=True):

            def forward(hook: str, rank: Rank = rank) -> None:
                if hook == "wait_for_layer_load":
                    for request in scheduled:
                        self._compute(rank, request)

            arguments: dict[str, Any] = dict.fromkeys(("forward_context", "layer_name", "kv_layer", "attn_metadata"))
            gave = replay(
                self.release,
                "work_with_tokens" if scheduled else "work_without_tokens",
                worker,
                forward,
                metadata=pickle.loads(pickle.dumps(metadata)),
                finished_req_ids=finished,
                **arguments,
            )
            self._collect(output, gave)
        output.failed_recving = self._failing & output.finished_recving
        self._failing -= output.failed_recving
        return output

    def _collect(self, output: SimpleNamespace, gave: dict[str, Any]) -> None:
        """Adds a rank's report: a request has ended when every rank has said so, a block is bad when one has."""
        if "get_transfer_results" in gave:
            results = gave["get_transfer_results"]
            sent, received = results.finished_sending, results.finished_recving
            assert results.failed_recving <= received
            self._failing |= results.failed_recving
        else:
            sent, received = gave["get_finished"]
        for kind, ids, ended in (
            ("sent", sent, output.finished_sending),
            ("received", received, output.finished_recving),
        ):
            for request_id in ids or ():
                self._missing[kind][request_id] += 1
                if self._missing[kind][request_id] == len(self.ranks):
                    del self._missing[kind][request_id]
                    ended.add(request_id)
        if (stats := gave["get_kv_connector_stats"]) is not None:
            self.stats = stats if self.stats is None else self.stats.aggregate(stats)
        bad = gave["get_block_ids_with_load_errors"]
        # Any later, and they would be another request's.
        assert bad <= {block for request_id in received or () for ids in self.blocks[request_id] for block in ids}
        output.invalid_block_ids |= bad

    def _compute(self, rank: Rank, request: Request) -> None:
        """A forward pass of one rank: reads the KV of what was computed before, and writes that of the rest."""
        blocks = self.blocks[request.request_id]
        computed = min(request.num_computed_tokens, request.num_prompt_tokens)
        rank.check(request.prompt_token_ids, blocks, range(computed))
        rank.compute(request.prompt_token_ids, blocks, range(computed, request.num_prompt_tokens))

    def _update(self, output: SimpleNamespace, scheduled: list[Request]) -> None:
        lost = self._failures(output)
        for request in scheduled:
            request.num_computed_tokens = request.num_prompt_tokens
            request.num_output_tokens += 1
            if request.num_output_tokens == request.max_tokens:
                self.finish(request, Status.FINISHED_LENGTH_CAPPED)
        for request in lost:
            self.finish(request, Status.FINISHED_ERROR)
        gave = replay(self.release, "update", self.scheduler, connector_output=output)
        assert not gave["take_events"]
        for request_id in output.finished_recving:
            request = self.requests[request_id]  # vLLM's engine dies of an id that it doesn't hold
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self._received.add(request_id)
            else:
                assert request.is_finished()
                self._forget(request)
        for request_id in output.finished_sending:
            assert self.requests[request_id].is_finished()
            self._forget(self.requests[request_id])

    def _failures(self, output: SimpleNamespace) -> list[Request]:
        """What is lost for good, by policy; the rest of what failed will be computed here."""
        loading = [request for request in self.waiting if request.status is Status.WAITING_FOR_REMOTE_KVS]
        lost = []
        assert self.groups == 1 or not output.invalid_block_ids
        for request in loading:
            bad = [
                at for at, block in enumerate(self.blocks[request.request_id][0]) if block in output.invalid_block_ids
            ]
            if request.request_id not in output.failed_recving and not bad:
                continue
            if self.policy == "fail":
                lost.append(request)
            else:
                request.num_computed_tokens = bad[0] * BLOCK_TOKENS if bad else 0
                self._failed.add(request.request_id)
        return lost

    def _allocate(self, request: Request, num_tokens: int) -> None:
        groups = self.blocks.setdefault(request.request_id, [[] for _ in range(self.groups)])
        fresh = not any(groups)
        wanted = -(-num_tokens // BLOCK_TOKENS)
        for group, ids in enumerate(groups):
            while len(ids) < wanted:
                ids.append(NULL_BLOCK if group and len(ids) < wanted - 1 else self.free.pop(0))
        if fresh:
            for rank in self.ranks:
                rank.write(request.prompt_token_ids, groups, range(request.local_tokens))

    def _window(self, request: Request) -> list[list[int]]:
        return self.blocks.get(request.request_id, [[] for _ in range(self.groups)])

    def _give_back(self, request: Request) -> None:
        for ids in self.blocks.pop(request.request_id, ()):
            self.free += [block for block in ids if block != NULL_BLOCK]

    def _forget(self, request: Request) -> None:
        self._give_back(request)
        del self.requests[request.request_id]
