"""Digests that tell whose KV cache it is: of a prompt's prefix, and of what an answer says about its export.

Both ends compute them, each from what it knows itself, and the owner compares before a byte moves. What is hashed is
fixed here: a change of the encoding needs another `_VERSION`, or releases stop understanding one another.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

__all__ = ["Media", "prefix_digest", "seal", "signature", "signing_key"]

_VERSION = b"pdkv-prefix-1"
_PREFIX_BYTES = 32
_SEAL_BYTES = 16


class Media(NamedTuple):
    """An image, a sound, or another item whose embedding stands in place of tokens.

    Attributes:
        hash: The LLM engine's hash of its content.
        offset: Position of its first token in the prompt.
        length: Tokens that it stands for.
    """

    hash: str
    offset: int
    length: int


def prefix_digest(
    token_ids: Sequence[int],
    num_tokens: int,
    *,
    lora: str | None = None,
    cache_salt: str | None = None,
    media: Iterable[Media] = (),
) -> bytes:
    """Digest of the first `num_tokens` tokens and of everything else that their KV depends on.

    Args:
        token_ids: The prompt, at least `num_tokens` long.
        num_tokens: Tokens that count.
        lora: Name of the adapter, if any.
        cache_salt: The request's salt, if any.
        media: Items in the prompt; those that begin behind the prefix do not count.

    Returns:
        32 bytes.

    Raises:
        OverflowError: A token id is negative or does not fit 32 bits.
    """
    ids = array("I", token_ids[:num_tokens])
    if sys.byteorder == "big":
        ids.byteswap()
    inside = sorted(item for item in media if item.offset < num_tokens)
    rest = [lora, cache_salt, [[item.hash, item.offset, item.length] for item in inside]]
    hasher = blake2b(digest_size=_PREFIX_BYTES)
    for part in (_VERSION, ids.tobytes(), _canonical(rest)):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def seal(statement: Mapping[str, Any]) -> bytes:
    """Digest of what an answer says about its export, but for the references, which have a seal of their own.

    Args:
        statement: JSON values only.

    Returns:
        16 bytes.
    """
    return blake2b(_canonical(statement), digest_size=_SEAL_BYTES).digest()


def signature(blob: Mapping[str, Any], host: str, port: int, key: bytes) -> str:
    """Keyed digest of all that an answer says, and of where its producer is.

    Args:
        blob: The object `pdkv`, but for its signature.
        host: Host of the producer's directory.
        port: Port of the producer's directory.
        key: What producers and consumers share.

    Returns:
        64 hexadecimal digits.
    """
    said = {name: value for name, value in blob.items() if name != "signature"}
    return blake2b(_canonical([said, host, port]), digest_size=32, key=key).hexdigest()


def signing_key(secret: bytes) -> bytes:
    """The key that a secret of any length stands for."""
    return blake2b(secret, digest_size=64, person=b"pdkv-params").digest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
