"""How the engines and servers of these tests are set up: environment, engine arguments, and connectors by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from with_vllm.ports import free_port

TESTS = Path(__file__).resolve().parents[1]

BLOCK_TOKENS = 32
# Of every tensor-parallel rank. 1024 blocks of the tiny model.
KV_BYTES = 64 << 20

# What the environment of every process with an engine has: several of them share the CPUs, nothing leaves the machine,
# nothing is looked for elsewhere. Python keeps what it has compiled, or each of them would compile vLLM.
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp,self,sm",
    "no_proxy": "127.0.0.1",
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
# The engine steps in the process that asks. That of a server does in one of its own and not in a second one from there,
# as on a machine with a GPU; on CPUs that would be vLLM's default.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def engine(model, *, transfer=None, **overrides):
    """Arguments of one engine, as `EngineArgs` has them."""
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "seed": 0,
        "block_size": BLOCK_TOKENS,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": KV_BYTES,
        "enforce_eager": True,
        "disable_log_stats": True,
        "distributed_executor_backend": "uni",
    }
    if transfer:
        arguments["kv_transfer_config"] = transfer
    return arguments | overrides


def transfer(connector, role, *, policy="fail", **extra):
    """A KV transfer configuration: `connector` is `pdkv` or, to try what surrounds it, vLLM's own `nixl`."""
    config = {"kv_role": role, "kv_load_failure_policy": policy, "kv_connector_extra_config": extra}
    if connector == "nixl":
        return config | {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    return config | {"kv_connector": "PdkvConnector"}  # vLLM finds it by pdkv's entry point


def side_channel():
    """Where vLLM's own connector meets its peers."""
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}


def script(name):
    """The path of a program of the environment that runs these tests, which is the one that has vLLM."""
    return str(Path(sys.prefix) / "bin" / name)
