"""What a client's body becomes for each leg. Pure: bytes in, bytes out; knows OpenAI's fields and vLLM's additions.

Fields are passed on as the client wrote them: a body of millions of tokens is parsed once and never written anew.

A request is split only where two instances give the same answer as one. Whatever that can't be said of goes to a decode
instance alone, with the reason. The prefill instance gets the client's fields as they are, except for those that would
make it produce more than one token: what an instance would refuse is then refused before KV is computed and kept.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import is_
from typing import Any

from pdkv.proxy.answers import failed

CHARACTERS_PER_TOKEN = 4

# Far beyond any schema of a tool, and far below what would end Python's recursion, here or in an engine.
_MAX_DEPTH = 200

# Some ten times what OpenAI and vLLM know. Every other cost of a body is paid once, this one for each leg.
_MAX_FIELDS = 1000

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

_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class Ask:
    """What a client asks for.

    Attributes:
        fields: The JSON of each field of the body, without what a client may not say.
        prompt_tokens: Length of the prompt: exact for a prompt of token ids, else estimated from its characters.
        alone: Why the request must not be split, or None.
    """

    fields: dict[str, bytes]
    prompt_tokens: int
    alone: str | None


def read(raw: bytes, *, chat: bool) -> Ask:
    """Understands a body as far as the proxy must. Takes tens of ms for each MiB of token ids; may run in any thread.

    Raises:
        FailedError: It is no JSON object, nested too deeply, or has too many fields.
    """
    counted = ("messages", "tools") if chat else ("prompt",)
    fields: dict[str, bytes] = {}
    values: dict[str, Any] = {}
    sizes: dict[str, tuple[int, int]] = {}
    try:
        text = raw.decode(json.detect_encoding(raw), "surrogatepass")
        for name, value, written in _members(text):
            size = _measure(value)
            if name in _RESERVED:
                continue
            if name == "vllm_xargs" and isinstance(value, dict) and not value.keys().isdisjoint(_RESERVED):
                kept = {inner: said for inner, said in value.items() if inner not in _RESERVED}
                written = json.dumps(kept, allow_nan=False)
            # A name that comes twice means what it said last, as for every parser of Python.
            fields[name], values[name], sizes[name] = written.encode("utf-8", "surrogatepass"), value, size
    except (ValueError, RecursionError) as error:
        raise failed(400, f"the body is no JSON object that can be served: {error}", "refused") from None
    said = [sizes[name] for name in counted if name in sizes]
    ids, characters = sum(size[0] for size in said), sum(size[1] for size in said)
    return Ask(fields, ids + -(-characters // CHARACTERS_PER_TOKEN), _alone(values, chat=chat))


def for_prefill(ask: Ask) -> bytes:
    """The body that makes a prefill instance compute the prompt's KV, sample one token and keep the KV for somebody."""
    told: dict[str, Any] = {"max_tokens": 1, "stream": False, "kv_transfer_params": _PREFILL_PARAMS}
    if "n" in ask.fields:
        told["n"] = 1  # all samples start from the same prompt
    if "max_completion_tokens" in ask.fields:
        told["max_completion_tokens"] = 1
    return _written(ask.fields, told, without=("stream_options", "min_tokens", "best_of"))


def for_decode(ask: Ask, params: dict[str, Any] | None) -> bytes:
    """The client's body, with what the prefill instance answered, or without where nothing was prefilled."""
    return _written(ask.fields, {} if params is None else {"kv_transfer_params": params})


def _members(text: str) -> Iterator[tuple[str, Any, str]]:
    """Name, value and text of the value of each member of an object, in C's time but for one step a member."""

    def space(at: int) -> int:
        found = _SPACE.match(text, at)
        assert found is not None
        return found.end()

    def expect(mark: str, at: int) -> int:
        at = space(at)
        if text[at : at + 1] not in mark or at == len(text):
            raise json.JSONDecodeError(f"Expecting one of `{mark}`", text, at)
        return at

    at = expect("{", 0)
    more = text[expect('"}', at + 1)] == '"'
    at = space(at + 1)
    for _ in range(_MAX_FIELDS):
        if not more:
            break
        name, at = _DECODER.raw_decode(text, expect('"', at))
        start = space(expect(":", at) + 1)
        value, end = _DECODER.raw_decode(text, start)
        yield name, value, text[start:end]
        at = expect(",}", end)
        more = text[at] == ","
        at += more
    if more:
        raise ValueError(f"it has more than `{_MAX_FIELDS}` fields")
    if space(at + 1) != len(text):
        raise json.JSONDecodeError("Extra data", text, at + 1)


def _written(fields: dict[str, bytes], told: dict[str, Any], without: tuple[str, ...] = ()) -> bytes:
    kept = {name: written for name, written in fields.items() if name not in without}
    kept |= {name: json.dumps(value).encode() for name, value in told.items()}
    return b"{" + b", ".join(json.dumps(name).encode() + b": " + value for name, value in kept.items()) + b"}"


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
    return len(prompt) == 1 or set(map(type, prompt)) == {int}


def _measure(value: object) -> tuple[int, int]:
    """How many integers and how many characters are in a value, which is looked at level by level.

    Raises:
        ValueError: It is nested too deeply.
    """
    ids = characters = 0
    layer: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        kinds = Counter(map(type, layer))
        ids += kinds[int]
        characters += sum(map(len, _only(str, layer))) if kinds[str] else 0
        lists = _only(list, layer) if kinds[list] else ()
        dicts = _only(dict, layer) if kinds[dict] else ()
        layer = list(chain.from_iterable(chain(lists, map(dict.values, dicts))))
        if not layer:
            return ids, characters
    raise ValueError(f"it is nested more than `{_MAX_DEPTH}` levels deep")


def _only(kind: type, values: list[Any]) -> Iterable[Any]:
    return compress(values, map(is_, map(type, values), repeat(kind)))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"`{name}` is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
