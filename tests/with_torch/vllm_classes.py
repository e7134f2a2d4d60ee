"""vLLM 0.8.5's modules of disaggregated prefill, imported from its own files without what serving a model would need.

`load()` makes them importable. Left out are the `__init__` files of `vllm`, `vllm.distributed` and
`vllm.distributed.kv_transfer`, which would import all of vLLM. Stood in for are the parts below; everything else under
`vllm.distributed.kv_transfer` is vLLM's, unchanged, as `test_environment.py` checks by the hashes of its wheel.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

import pydantic
import torch

# Packages of which only the folder is wanted.
HOLLOW = ["vllm", "vllm.distributed", "vllm.distributed.kv_transfer", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"]


def load() -> None:
    """Makes vLLM's modules importable. Does nothing where that has been done, or where vLLM itself was imported."""
    if "vllm" in sys.modules:
        return
    spec = importlib.util.find_spec("vllm")
    assert spec is not None, "vLLM is not installed: `make torch`"
    [folder] = spec.submodule_search_locations
    for name in HOLLOW:
        package = _add(name)
        package.__path__ = [str(Path(folder, *name.split(".")[1:]))]
    _add_config(Path(folder, "config.py"))
    # Only named in annotations.
    _add("vllm.sequence", IntermediateTensors=type("IntermediateTensors", (), {}))
    _add("vllm.v1.core.sched.output", SchedulerOutput=type("SchedulerOutput", (), {}))
    # Only called where there is CUDA.
    _add("vllm.utils", current_stream=torch.cuda.current_stream, find_nccl_library=lambda: "libnccl.so.2")
    # The two operations that write a cache are CUDA kernels in vLLM.
    _add("vllm._custom_ops", reshape_and_cache_flash=reshape_and_cache_flash, concat_and_cache_mla=concat_and_cache_mla)


def _add(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name, "Stands in for vLLM's, see with_torch/vllm_classes.py.")
    vars(module).update(members)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _add_config(file: Path) -> None:
    """`vllm.config` with the one class `KVTransferConfig` of vLLM's file, whose other imports are not wanted."""
    tree = ast.parse(file.read_text(), str(file))
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KVTransferConfig"]
    wanted = {"Any": Any, "BaseModel": pydantic.BaseModel, "Optional": Optional, "hashlib": hashlib}
    module = _add("vllm.config", VllmConfig=object, **wanted)
    exec(compile(tree, str(file), "exec"), vars(module))


def reshape_and_cache_flash(key, value, key_cache, value_cache, slots, kv_cache_dtype, k_scale, v_scale):
    """Writes keys and values, `[n, H, D]`, at slots of caches `[blocks, block, H, D]`, divided by the scales."""
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        cache.view(-1, *cache.shape[2:])[slots] = (rows / scale).to(cache.dtype) if scale != 1 else rows.to(cache.dtype)


def concat_and_cache_mla(kv_c, k_pe, kv_cache, slots, kv_cache_dtype, scale):
    """Writes latents, `[n, R]` and `[n, P]`, side by side at slots of a cache `[blocks, block, R + P]`."""
    kv_cache.view(-1, kv_cache.shape[-1])[slots] = torch.cat([kv_c, k_pe], dim=-1).to(kv_cache.dtype)
