"""What a client's body becomes for each leg. Pure: bytes in, bytes out; knows OpenAI's fields and vLLM's additions.

A request is split only where two instances give the same answer as one. Whatever that can't be said of goes to a decode
instance alone, with the reason. The prefill instance gets the client's fields as they are, except for those that would
make it produce more than one token: what an instance would refuse is then refused before KV is computed and kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pdkv.proxy.answers import failed

CHARACTERS_PER_TOKEN = 4

# Far beyond any schema of a tool, and far below what would end Python's recursion.
_MAX_DEPTH = 200

# What only a router may say to an engine; from a client it could name somebody else's KV.
_RESERVED = ("kv_transfer_params", "ec_transfer_params")

_PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class Ask:
    """What a client asks for.

    Attributes:
        fields: The body, without what a client may not say.
        prompt_tokens: Length of the prompt: exact for a prompt of token ids, else estimated from its characters.
        alone: Why the request must not be split, or None.
    """

    fields: dict[str, Any]
    prompt_tokens: int
    alone: str | None


def read(raw: bytes, *, chat: bool) -> Ask:
    """Understands a body as far as the proxy must.

    Raises:
        FailedError: It is no JSON object, or nested too deeply.
    """
    try:
        fields = json.loads(raw, parse_constant=_refuse_constant)
        if _depth_exceeds(fields, _MAX_DEPTH):
            raise ValueError(f"it is nested more than `{_MAX_DEPTH}` levels deep")
        json.dumps(fields, allow_nan=False)  # 1e999 is read as infinity, which is no JSON
    except (ValueError, RecursionError) as error:
        raise failed(400, f"the body is no JSON: {error}", "refused") from None
    if not isinstance(fields, dict):
        raise failed(400, "the body is no JSON object", "refused")
    fields = {name: value for name, value in fields.items() if name not in _RESERVED}
    extra = fields.get("vllm_xargs")
    if isinstance(extra, dict):
        fields["vllm_xargs"] = {name: value for name, value in extra.items() if name not in _RESERVED}
    said = (fields.get("messages"), fields.get("tools")) if chat else fields.get("prompt")
    return Ask(fields, _tokens(said), _alone(fields, chat=chat))


def for_prefill(ask: Ask) -> bytes:
    """The body that makes a prefill instance compute the prompt's KV, sample one token and keep the KV for somebody."""
    fields = dict(ask.fields)
    for name in ("stream_options", "min_tokens", "best_of"):
        fields.pop(name, None)
    if "n" in fields:
        fields["n"] = 1  # all samples start from the same prompt
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    fields |= {"max_tokens": 1, "stream": False, "kv_transfer_params": _PREFILL_PARAMS}
    return json.dumps(fields).encode()


def for_decode(ask: Ask, params: dict[str, Any] | None) -> bytes:
    """The client's body, with what the prefill instance answered, or without where nothing was prefilled."""
    fields = ask.fields if params is None else ask.fields | {"kv_transfer_params": params}
    return json.dumps(fields).encode()


def _alone(fields: dict[str, Any], *, chat: bool) -> str | None:
    echoed = fields.get("echo") and (fields.get("top_logprobs" if chat else "logprobs") is not None)
    if fields.get("prompt_logprobs") is not None or echoed:
        return "prompt_logprobs"  # they come out of the computation that a hand-over saves
    if fields.get("use_beam_search"):
        return "beam_search"  # many requests inside the engine, which carry no parameters
    if fields.get("truncate_prompt_tokens") is not None:
        return "truncation"  # may depend on max_tokens, which differs between the legs
    if fields.get("prompt_embeds") is not None:
        return "prompt_embeds"  # KV is paired by token ids
    if not chat and not _is_one_prompt(fields.get("prompt")):
        return "several_prompts"  # one answer can name the KV of one prompt
    return None


def _is_one_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, list) or not prompt:
        return False
    return len(prompt) == 1 or all(type(token) is int for token in prompt)


def _tokens(said: object) -> int:
    """Length of a prompt, or of several together."""
    ids = characters = 0
    for piece in _pieces(said):
        if isinstance(piece, str):
            characters += len(piece)
        else:
            ids += 1
    return ids + -(-characters // CHARACTERS_PER_TOKEN)


def _pieces(said: object) -> Iterator[str | int]:
    if isinstance(said, str) or type(said) is int:
        yield said
    elif isinstance(said, dict):
        for value in said.values():
            yield from _pieces(value)
    elif isinstance(said, (list, tuple)):
        for value in said:
            yield from _pieces(value)


def _depth_exceeds(value: object, levels: int) -> bool:
    layer = [value]
    while layer and levels >= 0:
        levels -= 1
        inner = (one.values() if isinstance(one, dict) else one for one in layer if isinstance(one, (dict, list)))
        layer = [child for children in inner for child in children]
    return bool(layer)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"`{name}` is no number of JSON")
