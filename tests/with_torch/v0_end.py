"""One end of the scenarios in a process of its own: `python -m with_torch.v0_end FACE ROLE PORT FOLDER [NAME ...]`.

Runs the named scenarios, all by default, each with connectors of its own, and saves what the consumer got.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest import mock

import torch

from pdkv.compat import vllm_v0
from pdkv.lookup_buffer import SimpleBuffer
from pdkv.pipe import BrokenPipeException, PdkvPipe
from with_torch import vllm_classes
from with_torch.scenarios import SCENARIOS, consume, produce, vllm_config

# What stands behind `--kv-transfer-config`; the ends differ in rank and role.
FACES = {
    "their buffer over our pipes": "PyNcclConnector",
    "their producer, our consumer": "PyNcclConnector",
    "our producer, their consumer": "PyNcclConnector",
    "installed": "PyNcclConnector",
    "installed for mooncake": "MooncakeConnector",
    "connector": "PdkvConnector",
    "connector for both": "PdkvConnector",
}
BUFFER_BYTES = 64 << 20


TRANSFER = "vllm.distributed.kv_transfer"


@contextmanager
def face(name, role, folder, port):
    """Puts pdkv where the face has it, while the block makes the connector and uses it."""
    if name.startswith(("their", "our")):
        ours = f"our {role.removeprefix('kv_')}" in name
        with ExitStack() as patches:
            patches.enter_context(mock.patch(f"{TRANSFER}.kv_pipe.pynccl_pipe.PyNcclPipe", PdkvPipe))
            if ours:
                place = f"{TRANSFER}.kv_connector.simple_connector.SimpleBuffer"
                patches.enter_context(mock.patch(place, SimpleBuffer))
            yield
    elif name.startswith("installed"):
        config = Path(folder, f"mooncake-{os.getpid()}.json")
        config.write_text(json.dumps({"prefill_url": f"127.0.0.1:{port}", "decode_url": "127.0.0.1:1"}))
        os.environ["MOONCAKE_CONFIG_PATH"] = str(config)
        vllm_v0.install()
        yield
        vllm_v0.uninstall()
    else:
        vllm_v0.register()
        yield


def connector(name, scenario, role, port):
    """Makes the connector as vLLM 0.8 makes it."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = KVTransferConfig(
        kv_connector=FACES[name],
        kv_role="kv_both" if name.endswith("both") else role,
        kv_rank=["kv_producer", "kv_consumer"].index(role),
        kv_parallel_size=2,
        kv_port=port,
        kv_buffer_size=BUFFER_BYTES,
        kv_connector_extra_config={"store_timeout": 60, "lookup_timeout": 60, "drain_timeout": 60},
    )
    return KVConnectorFactory.create_connector_v0(0, 0, vllm_config(scenario, config))


def main(name, role, port, folder, *names):
    """Runs the scenarios one after the other, at ports that follow each other."""
    os.environ["VLLM_USE_V1"] = "0"
    vllm_classes.load()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    for number, scenario in enumerate(names or SCENARIOS):
        with face(name, role, folder, int(port) + 2 * number):
            end = connector(name, SCENARIOS[scenario], role, int(port) + 2 * number)
            if role == "kv_producer":
                produce(end, SCENARIOS[scenario])
            else:
                torch.save(consume(end, SCENARIOS[scenario]), Path(folder, f"{scenario}.pt"))
            close(end, name)


def close(end, name):
    """Ends a connector; vLLM's own can't be closed by its `close`."""
    if not name.startswith(("their", "our")):
        end.close()
        return
    for side in (end.producer_buffer, end.consumer_buffer):
        if side is not None:
            side.close()
            for pipe in (side.data_pipe, side.signal_pipe):
                with suppress(BrokenPipeException):  # the other end was closed first
                    pipe.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
