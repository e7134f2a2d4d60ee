"""Settings of the `ucx` transport: checked at once, frozen, and read by the engine without loading any UCX."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import pdkv
from pdkv import wheels


def test_defaults_and_copies():
    config = pdkv.UcxConfig()
    assert (config.library, config.one_sided, config.settings) == (None, "rdma", {})
    settings = {"TLS": "tcp"}
    config = pdkv.UcxConfig(library=Path("libucp.so.0"), one_sided="never", settings=settings)
    settings["TLS"] = "rc"
    assert config.settings == {"TLS": "tcp"}
    assert pickle.loads(pickle.dumps(config)) == config
    assert len({config, pdkv.UcxConfig(library=Path("libucp.so.0"), one_sided="never", settings=config.settings)}) == 1
    assert dataclasses.replace(config, one_sided="any").one_sided == "any"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.one_sided = "any"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("library", ""),
        ("library", 7),
        ("one_sided", "always"),
        ("one_sided", None),
        ("settings", "TLS=tcp"),
        ("settings", {"": "y"}),
        ("settings", {7: "y"}),
        ("settings", {"A=B": "y"}),
        ("settings", {"TLS": 7}),
        ("settings", {"TLS": "tcp\0"}),
        ("settings", {"UCX_TLS": "tcp"}),
        ("settings", {"ucx_tls": "tcp"}),
        ("settings", {"TLS": "tcp\udc80"}),
        ("library", "libucp\udc80.so"),
        ("library", b"libucp.so.0"),
    ],
)
def test_bad_fields_are_refused_by_name(field, value):
    with pytest.raises(pdkv.ConfigError, match=field) as caught:
        pdkv.UcxConfig(**{field: value})
    assert caught.value.hint


@pytest.mark.parametrize("policy", ["rdma", "kernel", "any", "never"])
def test_the_engine_takes_every_policy(policy):
    pdkv.Engine("a", listen=None, ucx=pdkv.UcxConfig(one_sided=policy)).close()


@pytest.mark.parametrize("thing", [{"one_sided": "any"}, "any", 7])
def test_the_engine_takes_nothing_else(thing):
    with pytest.raises(pdkv.ConfigError, match="`ucx` is a"):
        pdkv.Engine("a", listen=None, ucx=thing)


def test_an_engine_that_needs_no_ucx_loads_none():
    script = """
import pdkv
with pdkv.Engine("a", transports=["tcp"], ucx=pdkv.UcxConfig(library="/nowhere/libucp.so.0")) as a:
    with pdkv.Engine("b", transports=["tcp"]) as b:
        b.connect(a.address)
        assert "libucp" not in open("/proc/self/maps").read()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


def install(folder, *files):
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemExit('imported')" if path.suffix == ".py" else "")


def test_wheels_are_found_without_being_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("libucx", "nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert wheels.folders() == []
    install(tmp_path, "libucx/__init__.py", "libucx/lib/libucp.so.0", "nixl_cu13/__init__.py")
    assert wheels.folders() == [("libucx wheel", str(tmp_path / "libucx/lib"))]
    install(tmp_path, "nixl_cu13.libs/libucp-12ab.so.0.0.0", "nixl_cu12/__init__.py", "nixl_cu12.libs/libnuma.so")
    assert wheels.folders() == [
        ("nixl wheel", str(tmp_path / "nixl_cu13.libs")),
        ("libucx wheel", str(tmp_path / "libucx/lib")),
    ]


def test_a_broken_package_is_passed_over(monkeypatch):
    monkeypatch.setitem(sys.modules, "libucx", None)
    assert not any(origin == "libucx wheel" for origin, _ in wheels.folders())
    monkeypatch.setitem(sys.modules, "libucx", object())
    assert not any(origin == "libucx wheel" for origin, _ in wheels.folders())


def test_what_is_required_and_cannot_be_had_says_why_of_every_transport():
    with pdkv.Engine("a", transports=["cma", "tcp"]) as a, pdkv.Engine("b", transports=["cma", "tcp"]) as b:
        source, target = a.register(bytearray(64)), b.register(bytearray(64))
        peer = b.connect(a.address)
        with pytest.raises(pdkv.UnsupportedError) as caught:
            peer.read(target, source.describe(), require="rdma")
        for reason in ("cma: not RDMA", "tcp: not RDMA", "ucx: "):
            assert reason in caught.value.message
        with pytest.raises(pdkv.UnsupportedError, match="ucx: "):
            peer.write(source.describe(), target, require="ucx")
        with pytest.raises(pdkv.ConfigError) as caught:
            peer.read(target, source.describe(), require="carrier pigeon")
        assert "`rdma`" in caught.value.hint
        transfer = peer.read(target, source.describe())
        transfer.wait(60)
        assert transfer.path.rdma is False


@pytest.mark.parametrize("names", [(None,), [b"ucx"], 7, "ucx"])
def test_transports_are_a_list_of_names(names):
    with pytest.raises(pdkv.ConfigError, match="`transports`") as caught:
        pdkv.Engine("a", listen=None, transports=names)
    assert caught.value.hint
