"""Crates stand in a straight line: each may use what stands to its left, and each knows only its own world."""

from __future__ import annotations

import pytest

from repo.tree import ROOT, crates, files, name, rust_code

# Left to right. A crate may depend on any crate before it.
LINE = ["pdkv-core", "pdkv-device", "pdkv-ucx", "pdkv-engine", "pdkv-store", "pdkv-py"]

# The outside crates each library may use. A new one is a decision: add it here, with the change that needs it.
OUTSIDE = {
    "pdkv-core": {"blake3", "prost", "serde", "serde_json"},
    "pdkv-device": {"libc", "rustix"},
    "pdkv-ucx": {"libc", "tracing"},
    "pdkv-engine": {"getrandom", "mio", "rustix", "tracing"},
    "pdkv-py": {"pyo3"},
}

# `unsafe` is denied to these by the compiler, not by review.
FORBID_UNSAFE = ["pdkv-core", "pdkv-engine"]

# Words a crate must not speak, because the knowledge belongs to another layer.
FOREIGN_WORDS = {
    "pdkv-core": ["std::net", "std::thread", "std::fs", "Instant::now", "SystemTime::now", "getrandom", "pyo3"],
    "pdkv-device": ["pyo3", "std::net"],
    "pdkv-ucx": ["pyo3", "std::net", "pdkv_core::plan", "BlockTable", "KvLayout"],
    "pdkv-engine": ["pyo3"],
}


@pytest.mark.parametrize("crate", crates().values(), ids=lambda crate: crate.name)
def test_crate_depends_only_on_what_stands_to_its_left(crate):
    assert crate.name in LINE, f"`{crate.name}` has no place in the line of tests/repo/test_layering.py"
    left = set(LINE[: LINE.index(crate.name)])
    ours = {dependency for dependency in crate.dependencies() if dependency.startswith("pdkv-")}
    assert ours <= left, f"`{crate.name}` may not use {sorted(ours - left)}"


@pytest.mark.parametrize("crate", crates().values(), ids=lambda crate: crate.name)
def test_crate_uses_only_the_outside_crates_it_is_allowed(crate):
    outside = {dependency for dependency in crate.dependencies() if not dependency.startswith("pdkv-")}
    extra = outside - OUTSIDE.get(crate.name, set())
    assert not extra, f"`{crate.name}` gained {sorted(extra)}; if that is meant, add it to OUTSIDE here"


@pytest.mark.parametrize("crate", crates().values(), ids=lambda crate: crate.name)
def test_crate_takes_lints_and_version_from_the_workspace(crate):
    assert crate.manifest.get("lints") == {"workspace": True}
    for key in ("version", "edition", "rust-version", "license"):
        assert crate.manifest["package"][key] == {"workspace": True}, key


@pytest.mark.parametrize("crate", FORBID_UNSAFE)
def test_crate_forbids_unsafe_code(crate):
    head = (crates()[crate].folder / "src/lib.rs").read_text()
    assert "#![forbid(unsafe_code)]" in head


@pytest.mark.parametrize("crate", FOREIGN_WORDS)
def test_crate_does_not_speak_of_other_layers(crate):
    found = [
        f"{name(path)}: {word}"
        for path in crates()[crate].sources()
        if path.is_relative_to(crates()[crate].folder / "src")
        for word in FOREIGN_WORDS[crate]
        if word in rust_code(path).partition("#[cfg(test)]")[0]
    ]
    assert not found, found


@pytest.mark.parametrize("crate", crates().values(), ids=lambda crate: crate.name)
def test_every_module_says_what_it_is(crate):
    bare = [
        name(path)
        for path in crate.sources()
        if path.is_relative_to(crate.folder / "src") and "//!" not in "".join(path.read_text().splitlines(True)[:3])
    ]
    assert not bare, f"no `//!` paragraph at the head of {bare}"


# Only vLLM itself imports these, for the classes in them.
IMPORTED_BY_VLLM = ("python/pdkv/connectors/vllm.py", "python/pdkv/connectors/vllm_metrics.py")


def test_importing_pdkv_names_no_framework():
    heavy = ("import torch", "import vllm", "import cupy", "import matplotlib", "import rich")
    offenders = [
        f"{name(path)}: {line}"
        for path in files(".py")
        if path.is_relative_to(ROOT / "python/pdkv")
        if name(path) not in IMPORTED_BY_VLLM
        for line in path.read_text().splitlines()
        if line.startswith(heavy) or line.startswith(tuple(word.replace("import", "from") for word in heavy))
    ]
    assert not offenders, f"import it inside the function that needs it: {offenders}"


# Who may have a driver copy at bare addresses. Each holds the memory until it has waited for the copy, which the SAFETY
# lines of rust/pdkv-py/src/buffers/device.rs go by: look before one is added, and name it there.
COPIES_AT_ADDRESSES = ("benches/gpu_check", "python/pdkv/bench", "python/pdkv/doctor")


def test_only_those_who_hold_the_memory_copy_at_bare_addresses():
    users = {name(path) for path in files(".py") if "CudaLoop" in path.read_text()}
    for folder in COPIES_AT_ADDRESSES:
        assert any(user.startswith(f"{folder}/") for user in users), f"`{folder}` does no more"
    others = [user for user in users if not user.startswith((*COPIES_AT_ADDRESSES, "tests/"))]
    assert not others, f"{sorted(others)} use `CudaLoop`"
