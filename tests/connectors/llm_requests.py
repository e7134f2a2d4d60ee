"""What a scheduler hands to a connector: requests, their blocks and the engine's configuration, in plain stand-ins.

Fields are those of vLLM's own that a connector may look at, and no more, so that one that looks further fails.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class Status(enum.IntEnum):
    """Of the names that vLLM's has."""

    WAITING = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH_CAPPED = 6
    FINISHED_ABORTED = 7
    FINISHED_ERROR = 8


@dataclass(eq=False)
class Request:
    """A request with the fields of vLLM's that a connector may look at, and below them what the stand-in keeps."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    max_tokens: int = 1
    num_computed_tokens: int = 0
    status: Status = Status.WAITING
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    resumable: bool = False

    local_tokens: int = 0  # of the prompt that this engine's prefix cache has
    num_output_tokens: int = 0
    loads: int = 0  # how often something was loaded for it
    answer: dict[str, Any] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids

    def is_finished(self) -> bool:
        return self.status > Status.PREEMPTED


class Blocks:
    """Blocks of a request, by KV group."""

    def __init__(self, groups: list[list[int]]) -> None:
        self.groups = groups

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(ids) for ids in self.groups)


def engine_config(
    role: str, name: str, ranks: int, policy: str, sleep_mode: bool, cumem: bool, extra: dict[str, Any]
) -> SimpleNamespace:
    """The configuration of vLLM, as far as a connector may look."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="PdkvConnector",
            kv_role=role,
            engine_id=name,
            kv_port=14579,
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
            is_kv_producer=role != "kv_consumer",
            is_kv_consumer=role != "kv_producer",
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_index=0,
            data_parallel_rank=0,
        ),
        model_config=SimpleNamespace(model="tiny", enable_sleep_mode=sleep_mode, enable_cumem_allocator=cumem),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
