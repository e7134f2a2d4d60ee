"""The face for vLLM 0.8 where there is no vLLM, or another: typed errors, and a plugin that does no harm."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType

import pytest

import pdkv
from pdkv.compat import vllm_plugin, vllm_v0


@pytest.fixture(params=[None, "0.7.3", "0.11.0", "0.32.0", "dev"])
def release(request, monkeypatch):
    """A vLLM of another release than 0.8, or none."""
    there = request.param is not None
    version = ModuleType("vllm.version")
    version.__version__ = request.param
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm") if there else None)
    monkeypatch.setitem(sys.modules, "vllm.version", version if there else None)
    return request.param


def test_install_says_what_is_missing(release):
    with pytest.raises(pdkv.UnsupportedError) as caught:
        vllm_v0.install()
    assert "0.8" in str(caught.value)
    assert (f"`{release}`" if release else "not installed") in caught.value.message


def test_connector_and_registration_say_the_same(release):
    for call in (vllm_v0.register, lambda: vllm_v0.PdkvConnector):
        with pytest.raises(pdkv.UnsupportedError):
            call()


def test_uninstall_without_install_does_nothing(release):
    vllm_v0.uninstall()
    assert not vllm_v0.fits()


def test_plugin_does_no_harm(release):
    vllm_plugin.register()


def test_plugin_is_declared_where_vllm_looks():
    [plugin] = metadata.entry_points(group="vllm.general_plugins", name="pdkv")
    assert plugin.load() is vllm_plugin.register


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here, and imports all of itself")
def test_plugin_imports_nothing_heavy():
    script = "import sys; from pdkv.compat.vllm_plugin import register; register(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    assert {"torch", "numpy", "vllm"}.isdisjoint(done.stdout.split())


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="nothing"):
        _ = vllm_v0.nothing
