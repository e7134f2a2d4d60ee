"""`PdkvConnector`: pdkv as a KV connector of vLLM's V1 engine.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PdkvConnector", "kv_role": "kv_producer"}'

Translates vLLM's hooks into calls of `core` and back; decides nothing and moves nothing. Which hook a release of vLLM
calls, and how, is in `vllm_versions`. Importing this imports vLLM's base class, but neither torch's devices nor pdkv's
engine are touched before a connector is made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from pdkv.connectors import vllm_caches as caches
from pdkv.connectors import vllm_device as device
from pdkv.connectors import vllm_versions as versions
from pdkv.connectors.core.config import Settings
from pdkv.connectors.core.digest import Media, prefix_digest
from pdkv.connectors.core.work import RankInfo, Work
from pdkv.errors import UnsupportedError

if TYPE_CHECKING:
    from pdkv.connectors.core.scheduler import SchedulerSide
    from pdkv.connectors.core.worker import WorkerSide

__all__ = ["PdkvConnector"]

_FINISHED_WELL = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
_OPERATION = "PdkvConnector"


@dataclass
class PdkvMetadata(KVConnectorMetadata):
    """What the scheduler side orders of the workers for one step."""

    work: Work = Work.NOTHING
    step: int = 0


@dataclass
class PdkvHandshakeMetadata(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler side at start-up. Stays within the LLM engine: it holds keys."""

    info: RankInfo


class PdkvConnector(KVConnectorBase_V1, SupportsHMA):
    """Fetches the KV cache of prompts that another vLLM has prefilled, and lets others fetch.

    The producer answers a request that asks for `do_remote_decode` with `kv_transfer_params`; the consumer fetches for
    a request that carries them. What can't be fetched, or can't be believed, is a failed load, and
    `kv_load_failure_policy` says whether that is an error or a local prefill.

    Keys of `kv_connector_extra_config` are the fields of `pdkv.connectors.core.config.Settings`.

    Args:
        vllm_config: vLLM's configuration.
        role: Scheduler or worker.
        kv_cache_config: vLLM's KV cache groups.

    Raises:
        ConfigError: A setting can't be.
        UnsupportedError: The model or the parallel configuration is one that pdkv can't serve yet.
    """

    _cache_hit_source = versions.hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _join_logs()
        versions.check(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = vllm_config
        self._caches = kv_cache_config
        self._groups = [index for index, _ in caches.transfer_groups(kv_cache_config)]
        self._engine_id: str = transfer.engine_id
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._arrived: set[str] = set()
        self._begun: object = None
        self._carried: object = None
        self._clears_loaded = versions.clears_loaded(kv_cache_config)
        self._failed_blocks: set[int] = set()
        parallel = vllm_config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise UnsupportedError(f"`{name}` is `{getattr(parallel, name)}`", operation=_OPERATION)
        settings = Settings.of(transfer.kv_connector_extra_config or {}, **self._default_settings())
        buffer = getattr(transfer, "kv_buffer_device", None)
        settings = device.with_buffer_device(settings, buffer, versions.device_type())
        replica = getattr(parallel, "data_parallel_index", 0)
        self._settings = settings.of_replica(replica, parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
        self._sizes = {"tp_size": parallel.tensor_parallel_size, "pp_size": parallel.pipeline_parallel_size}
        tokens = caches.block_tokens(kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            from pdkv.connectors.core.scheduler import SchedulerSide

            self._scheduler = SchedulerSide(
                self._engine_id,
                self._settings,
                tokens,
                **self._sizes,
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
            )

    @classmethod
    def _default_settings(cls) -> dict[str, Any]:
        """Values for settings that the user left out."""
        return {}

    # Worker side.

    def get_mem_pool_context(self) -> Any:
        """Where the cache is allocated: as vLLM likes, unless other processes could not be given that memory."""
        return device.shareable_memory(self._config, versions.device_type())

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Starts this rank's engine and registers the tensors with it. Called once."""
        from pdkv.connectors.core.worker import WorkerSide

        where = device.device_of(kv_caches)
        ranks = {**versions.ranks(), **self._sizes}
        grouped = caches.group_caches(
            kv_caches,
            self._caches,
            model=self._settings.model_id or str(self._config.model_config.model),
            device=versions.packing(self._caches),
            cache_dtype=versions.cache_dtype(self._config),
            **ranks,
        )
        self._worker = WorkerSide(
            f"{self._engine_id}/{ranks['pp_rank']}.{ranks['tp_rank']}",
            self._settings,
            grouped,
            device=where,
            num_groups=len(self._groups),
            **ranks,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler side must know of this rank."""
        return None if self._worker is None else PdkvHandshakeMetadata(self._worker.info)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Begins what this step brings, before the forward pass: the next token does not have to wait for it."""
        self._begin(kv_connector_metadata)
        if not self._clears_loaded:
            self._carry(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins what this step brings where `handle_preemptions` was not called for it, as at steps without tokens."""
        del forward_context, kwargs
        metadata = self._get_connector_metadata()
        self._begin(metadata)
        self._carry(metadata)

    def _begin(self, metadata: Any) -> None:
        if self._worker is not None and isinstance(metadata, PdkvMetadata) and metadata is not self._begun:
            self._begun = metadata
            self._worker.begin_step(metadata.step)

    def _carry(self, metadata: Any) -> None:
        if self._worker is not None and isinstance(metadata, PdkvMetadata) and metadata is not self._carried:
            self._carried = metadata
            if metadata.work:
                self._worker.carry(metadata.work)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What has ended at this rank since it was last asked."""
        del finished_req_ids
        if self._worker is None:
            return versions.transfer_results(set(), set(), set())
        results = self._worker.results()
        return versions.transfer_results(results.sent, results.received, results.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same for releases before `get_transfer_results`; the failed ones are told by their blocks."""
        del finished_req_ids
        if self._worker is None:
            return None, None
        results = self._worker.results()
        self._failed_blocks |= results.failed_blocks
        return results.sent or None, results.received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the failed loads that `get_finished` reported."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are over before their request runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save: consumers fetch from the cache itself."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    # Scheduler side.

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Takes what the ranks told, by tensor-parallel rank."""
        self._set_ranks(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Takes what the ranks told, by pipeline- and tensor-parallel rank."""
        self._set_ranks(metadata.values())

    def _set_ranks(self, metadata: Iterable[Any]) -> None:
        # Within a MultiConnector another connector's comes along.
        ours = [item.info for item in metadata if isinstance(item, PdkvHandshakeMetadata)]
        if self._scheduler is not None and ours:
            self._scheduler.set_ranks(ours)

    def on_new_request(self, request: Any) -> None:
        """A request came in: its lease is kept alive from here on."""
        if self._scheduler is None or request.request_id in self._arrived or request.kv_transfer_params is None:
            return
        self._arrived.add(request.request_id)
        if _is_nameless(request):
            self._scheduler.turned_down(request.kv_transfer_params)
        else:
            self._scheduler.arrived(request.request_id, request.kv_transfer_params, request.num_prompt_tokens)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be fetched; has no effect beyond a request's arrival."""
        self.on_new_request(request)
        return (0, False) if self._scheduler is None else self._scheduler.match(request.request_id, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks: what is to be fetched goes into the next metadata."""
        if self._scheduler is not None and request.request_id in self._arrived:
            self._scheduler.allocated(
                request.request_id,
                self._select(blocks.get_block_ids()),
                num_external_tokens,
                lambda num_tokens: _digest(request, num_tokens),
            )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers are to do by this step."""
        if self._scheduler is None:
            return PdkvMetadata()
        work = self._scheduler.take(getattr(scheduler_output, "num_scheduled_tokens", ()))
        return PdkvMetadata(work, self._scheduler.step)

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must make another step, though it has no request: a producer is to be told something."""
        return self._scheduler is not None and self._scheduler.pending

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes what all ranks have reported."""
        if self._scheduler is not None:
            self._scheduler.ended(
                connector_output.finished_sending or (),
                connector_output.finished_recving or (),
            )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over: see `request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over: whether its blocks stay until they are fetched, and what the client is told."""
        if self._scheduler is None:
            return False, None
        self.on_new_request(request)
        self._arrived.discard(request.request_id)
        return self._scheduler.finished(
            request.request_id,
            request.kv_transfer_params,
            self._select(block_ids),
            min(request.num_computed_tokens, request.num_prompt_tokens),
            lambda num_tokens: _digest(request, num_tokens),
            complete=request.status.name in _FINISHED_WELL and not _is_nameless(request),
        )

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups that are moved are loaded, so that vLLM need not clear their blocks first."""
        del request
        return tuple(self._groups)

    def _select(self, block_ids: Sequence[Sequence[int]]) -> tuple[Sequence[int], ...]:
        return tuple(block_ids[index] for index in self._groups if index < len(block_ids))

    # Both sides.

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: an engine that sleeps would give its cache's memory back while others read it."""
        del kv_transfer_config
        return False

    def get_kv_connector_stats(self) -> Any:
        """What this rank has counted since it was last asked; `None` if nothing."""
        snapshot = None if self._worker is None else self._worker.stats.snapshot_and_reset()
        if snapshot is None:
            return None
        if getattr(self._config.kv_transfer_config, "kv_load_failure_policy", "fail") != "recompute":
            snapshot["num_recomputed_requests"] = 0  # a failed load ends its request
        from pdkv.connectors.vllm_metrics import PdkvStats

        return PdkvStats(data=snapshot)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Statistics that came from another process, or empty ones."""
        from pdkv.connectors.vllm_metrics import PdkvStats

        return PdkvStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> Any:
        """The metrics `vllm:pdkv_*`."""
        from pdkv.connectors.vllm_metrics import PdkvMetrics

        return PdkvMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Ends this side. Twice is no error."""
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()


def _is_nameless(request: Any) -> bool:
    """Whether the prompt is none that a digest could name: embeddings, or a session that grows."""
    return getattr(request, "prompt_embeds", None) is not None or bool(getattr(request, "resumable", False))


def _digest(request: Any, num_tokens: int) -> bytes:
    """Digest of the first tokens of a request's prompt and of what else their KV depends on."""
    lora = request.lora_request
    media = [
        Media(item.identifier, item.mm_position.offset, item.mm_position.length)
        for item in getattr(request, "mm_features", None) or ()
    ]
    return prefix_digest(
        request.prompt_token_ids,
        num_tokens,
        lora=None if lora is None else lora.lora_name,
        cache_salt=request.cache_salt,
        media=media,
    )


def _join_logs() -> None:
    """Shows pdkv's log where vLLM's is shown, unless somebody has set up another place for it."""
    ours, theirs = logging.getLogger("pdkv"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
