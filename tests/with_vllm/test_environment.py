"""The environment of these tests is what it says, and its models are the same whoever makes them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import pdkv
from with_vllm import models

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
PINNED = dict(re.findall(r"^([\w-]+)==(\S+)$", (Path(__file__).parent / "requirements.txt").read_text(), re.MULTILINE))


def test_every_pinned_package_is_installed_as_pinned():
    assert {name: metadata.version(name) for name in PINNED} == PINNED


def test_pdkv_is_the_one_of_this_tree():
    assert Path(pdkv.__file__) == ROOT / "python/pdkv/__init__.py"


@pytest.mark.parametrize("name", ["tiny", "windowed"])
def test_model_has_the_same_bits_whoever_makes_it(tmp_path, name):
    made = getattr(models, name)()
    again = f"from pathlib import Path; from with_vllm import models; models._make_{name}(Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", again], cwd=ROOT / "tests", check=True, timeout=900)
    assert {path.name for path in made.iterdir()} == {path.name for path in tmp_path.iterdir()}
    for path in made.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's, when vLLM is imported
def test_the_connector_is_found_by_its_name_by_its_module_and_as_nixls():
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    from pdkv.connectors import compat, vllm

    load_general_plugins()

    def found(name, module=None):
        config = KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_role="kv_both")
        return KVConnectorFactory.get_connector_class(config)

    assert found("PdkvConnector") is vllm.PdkvConnector
    assert found("PdkvConnector", "pdkv.connectors.vllm") is vllm.PdkvConnector
    assert found("NixlConnector", "pdkv.connectors.compat") is compat.NixlConnector
