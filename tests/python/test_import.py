"""Importing pdkv is cheap and changes nothing global; what the stub says is what is there."""

from __future__ import annotations

import subprocess
import sys

import pdkv


def run(script):
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240
    ).stdout


def test_import_pulls_in_no_heavy_module():
    heavy = {
        "torch",
        "numpy",
        "vllm",
        "asyncio",
        "ctypes",
        "argparse",
        "typing_extensions",
        "dataclasses",
        "logging",
        "typing",
        "re",
    }
    loaded = set(run("import pdkv, sys; print(*sys.modules)").split())
    assert "pdkv" in loaded
    assert loaded & heavy == set()


def test_import_leaves_environment_signals_and_threads_alone():
    script = """
import os, signal, sys
before = dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV)]
import pdkv
assert before == (dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV)])
print(len(os.listdir("/proc/self/task")))
"""
    assert run(script) == "1\n"


def test_every_exported_name_is_there_and_documented():
    for name in pdkv.__all__:
        thing = getattr(pdkv, name)
        assert name == "__version__" or thing.__doc__, name
    assert not hasattr(pdkv, "nothing")


def test_every_native_method_is_documented():
    classes = [getattr(pdkv, name) for name in pdkv.__all__ if isinstance(getattr(pdkv, name), type)]
    native = [cls for cls in classes if cls.__module__ == "pdkv" and not issubclass(cls, (Exception, tuple))]
    assert len(native) >= 15
    for cls in native:
        for name, member in vars(cls).items():
            assert name.startswith("_") or member.__doc__, f"{cls.__name__}.{name}"


def test_version_and_build():
    assert pdkv.__version__ in pdkv.build_info()
