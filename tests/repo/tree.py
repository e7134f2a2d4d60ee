"""The source tree as the house rules see it: tracked files, crates, and Rust text without comments."""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def files(*suffixes: str) -> tuple[Path, ...]:
    """All files that are tracked or would be, with one of the given suffixes (any, if none is given)."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in sorted(set(listing.split("\0"))) if name)
    return tuple(path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes))


def under(folder: str, *suffixes: str) -> tuple[Path, ...]:
    """The files of one folder of the repository."""
    return tuple(path for path in files(*suffixes) if path.is_relative_to(ROOT / folder))


def name(path: Path) -> str:
    """The path as a reader types it, for messages."""
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Crate:
    """One crate of the workspace."""

    name: str
    folder: Path
    manifest: dict[str, object]

    def dependencies(self) -> set[str]:
        """Names of the crates the library itself needs; tests may use more."""
        tables = ("dependencies", "build-dependencies")
        return {name for table in tables for name in self.manifest.get(table, {})}

    def sources(self) -> tuple[Path, ...]:
        """Every Rust file of the crate."""
        return tuple(path for path in files(".rs") if path.is_relative_to(self.folder))


@cache
def workspace() -> dict[str, object]:
    """The parsed Cargo.toml of the workspace."""
    return tomllib.loads((ROOT / "Cargo.toml").read_text())


@cache
def crates() -> dict[str, Crate]:
    """The crates by name, in workspace order."""
    found = {}
    for member in workspace()["workspace"]["members"]:
        manifest = tomllib.loads((ROOT / member / "Cargo.toml").read_text())
        crate = Crate(manifest["package"]["name"], ROOT / member, manifest)
        found[crate.name] = crate
    return found


_COMMENT_OR_STRING = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])'", re.DOTALL)


def rust_code(path: Path) -> str:
    """The text of a Rust file with comments and string literals blanked out."""
    return _COMMENT_OR_STRING.sub(lambda match: "\n" * match.group().count("\n"), path.read_text())


def rust_tests(path: Path) -> str:
    """The test code of a Rust file: all of it under `tests` or in `*tests.rs`, else what follows `#[cfg(test)]`."""
    text = path.read_text()
    if "tests" in path.relative_to(ROOT).parts or path.stem.endswith("tests"):
        return text
    return text.partition("#[cfg(test)]")[2]
