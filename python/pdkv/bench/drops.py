"""A process that moves one block, lets go of its objects in a given order, and ends: `TRANSPORT ORDER`.

Run as a program by the floors suite; the exit code is the result.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from pdkv.bench.producer import spawned, threaded
from pdkv.bench.side import Toolkit

_BYTES = 1 << 16


def main(transport: str, order: str) -> int:
    """Reads a region from the other process and drops things `engine-first`, `peer-first` or `never`."""
    from pdkv.bench.latency import block_case

    kit = Toolkit.real()
    producer = threaded(kit, 10.0) if transport == "inproc" else spawned(10.0)
    with producer as channel:
        opened = channel.ask("open", case=block_case("read", transport, 16, 1, 1).to_json())
        engine = kit.pdkv.Engine("drops", listen=None)
        memory: Any = engine.allocate(_BYTES) if transport == "shm" else np.zeros(_BYTES, np.uint8)
        region = engine.register(memory)
        peer = engine.connect(str(opened["address"]), timeout_s=10.0)
        remote = kit.pdkv.RegionDescriptor.from_json(str(opened["region"]))
        transfer = peer.read(region.span(0, _BYTES), remote.span(0, _BYTES), require=transport)
        transfer.wait(timeout_s=10.0)
        if order == "engine-first":
            engine.close()
            del engine, memory, region, peer, transfer
        elif order == "peer-first":
            peer.close()
            del transfer, peer, region, memory, engine
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
