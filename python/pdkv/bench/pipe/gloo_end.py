"""A process that carries tensors by `send` and `recv` of `torch.distributed` over gloo.

Run as a program by `peers`. The target receives into memory that it has already, of a shape that it knows already,
as gloo wants it; a pipe's receiver has neither.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pdkv.bench import control
from pdkv.bench.pipe import peer_end
from pdkv.bench.pipe.exchange import Exchange

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(seconds=300)


class Gloo(peer_end.Carrier):
    """One rank of a process group of two: the source is rank 0."""

    name = "gloo send/recv"

    def __init__(self, _: Exchange, role: str, address: str) -> None:
        """Makes the store where the two ranks meet, or finds it."""
        # Without it gloo asks the host's name for an address, which need not lead anywhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed

        self._distributed = torch.distributed
        self._rank = 0 if role == "src" else 1
        host, port = control.split_address(address) if address else (_HOST, 0)
        self._store = torch.distributed.TCPStore(
            host, port, 2, is_master=self._rank == 0, timeout=_TIMEOUT, wait_for_workers=False
        )
        self.address = control.join_address(host, self._store.port)
        self.note = f"torch {torch.__version__}; the target knows the shapes and lands in memory that it has"

    def connect(self) -> None:
        """Makes the process group."""
        self._distributed.init_process_group("gloo", store=self._store, rank=self._rank, world_size=2, timeout=_TIMEOUT)

    def send(self, sent: Sequence[Any]) -> None:
        """Sends one after the other."""
        for tensor in sent:
            self._distributed.send(tensor, 1)

    def receive(self, landing: Sequence[Any]) -> Sequence[Any]:
        """Receives one after the other."""
        for tensor in landing:
            self._distributed.recv(tensor, 0)
        return landing


if __name__ == "__main__":
    peer_end.main(Gloo)
