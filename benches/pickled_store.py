"""A process that carries tensors pickled, through the key-value store of `torch.distributed`.

That is what PyNcclPipe does where there is no CUDA; it also sends a message with dtype and shape and copies what it
unpickled, which is left out here. `pdkv bench --mode pipe` runs this program twice. It is not part of the package,
because nothing in there unpickles: who can write to such a store runs code wherever it is read. So the target compares
a digest, which comes by the channel of the bench, before it unpickles anything.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pdkv.bench import control
from pdkv.bench.pipe import peer_end
from pdkv.bench.pipe.exchange import Exchange
from pdkv.errors import IntegrityError

_HOST = "127.0.0.1"
_LIBUV_BYTES = (8 << 20) - 4096
_TIMEOUT = timedelta(seconds=300)


class PickledStore(peer_end.Carrier):
    """One end: the source has the store in its process, as rank 0 of a process group has."""

    name = "pickle over TCPStore"
    in_two_steps = True

    def __init__(self, exchange: Exchange, role: str, address: str) -> None:
        """Makes the store or finds it."""
        import torch
        from torch.distributed import TCPStore

        host, port = control.split_address(address) if address else (_HOST, 0)
        large = exchange.tensor_bytes > _LIBUV_BYTES
        self._store = TCPStore(
            host, port, 2, is_master=role == "src", timeout=_TIMEOUT, wait_for_workers=False, use_libuv=not large
        )
        self.address = control.join_address(host, self._store.port)
        self.note = f"torch {torch.__version__}; without the second message and the copy that PyNcclPipe adds"
        if large:
            self.note += "; the store's default server takes no value of more than 8 MiB, this is the older one"
        self._is_source = role == "src"
        self._counter = 0
        self._sent: list[bytes] = []
        self._keys: list[str] = []

    def send(self, sent: Sequence[Any]) -> None:
        """Stores a pickle of each."""
        for tensor in sent:
            pickled = pickle.dumps(tensor)
            self._store.set(self._next_key(), pickled)
            self._sent.append(pickled)

    def receive(self, landing: Sequence[Any]) -> Sequence[Any]:
        """Waits for as many values."""
        return [self._store.get(self._next_key()) for _ in landing]

    def prove(self) -> str:
        """Gives the digest of what was stored."""
        return _digest(self._sent)

    def check(self, received: Sequence[Any], proof: str) -> None:
        """Compares digests."""
        if _digest(received) != proof:
            raise IntegrityError("the store gave something else than what was stored")

    def finish(self, received: Sequence[Any]) -> Sequence[Any]:
        """Unpickles."""
        return [pickle.loads(pickled) for pickled in received]  # noqa: S301 - what it costs is what is measured here

    def forget(self) -> None:
        """Frees what the store holds; PyNcclPipe keeps it for an hour."""
        for key in [] if self._is_source else self._keys:
            self._store.delete_key(key)
        self._sent.clear()
        self._keys.clear()

    def _next_key(self) -> str:
        self._counter += 1
        self._keys.append(f"send_to/1/{self._counter}")
        return self._keys[-1]


def _digest(values: Sequence[bytes]) -> str:
    whole = hashlib.blake2b()
    for value in values:
        whole.update(value)
    return whole.hexdigest()


if __name__ == "__main__":
    peer_end.main(PickledStore)
