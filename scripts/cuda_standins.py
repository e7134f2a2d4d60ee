"""Builds stand-ins for the CUDA libraries that torch's wheel names and that are not installed.

The libraries in torch's wheel name a dozen of NVIDIA's, which weigh 2 GB more, and don't load without them, GPU or not.
A stand-in bears the library's name, the functions torch wants of it with their versions, and nothing else: each
function answers that there is no device. For tests on machines without a GPU; never for one that has one. Needs a C
compiler and `readelf`. Knows nothing of pdkv.

    python scripts/cuda_standins.py VENV/lib/python3.11/site-packages
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

CUDA_LIBRARY = re.compile(r"lib(?:cu|nv|nccl)\w*\.so\.\d+")
CUDA_SYMBOL = re.compile(r"_*(?:cu|nv|nccl)")
DRIVER = "libcuda.so.1"  # of the driver: torch opens it only when asked for a GPU
NO_DEVICE = 100  # cudaErrorNoDevice, and a failure in the numbering of every other library


@dataclass
class Wants:
    """What a set of libraries asks of others, and what it has itself."""

    libraries: set[str] = field(default_factory=set)
    versions: dict[str, str] = field(default_factory=dict)  # version -> the library that must have it
    symbols: set[tuple[str, str]] = field(default_factory=set)  # name, version or ""
    own: set[str] = field(default_factory=set)

    def add(self, library: Path) -> None:
        """Reads one library's tables.

        Raises:
            CalledProcessError: `readelf` can't read it.
        """
        text = _run("readelf", "--wide", "--dynamic", "--version-info", "--dyn-syms", str(library))
        self.libraries |= set(re.findall(r"\(NEEDED\).*\[(.+?)\]", text))
        needs = text.partition("Version needs section")[2]
        for block in re.split(r"File: ", needs)[1:]:
            self.versions |= dict.fromkeys(re.findall(r"Name: (\S+)  Flags", block), block.split(None, 1)[0])
        for section, word in re.findall(r"^ *\d+: [0-9a-f]+ +\S+ \S+ +\S+ +\S+ +(\S+) (\S+)", text, re.MULTILINE):
            name, _, version = word.partition("@")
            if section == "UND":
                self.symbols.add((name, version.lstrip("@")))
            else:
                self.own.add(name)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def missing(wants: Wants, packages: Path) -> dict[str, dict[str, set[str]]]:
    """The libraries to make, each with its symbols by version; `""` is no version."""
    there = {path.name for folder in packages.glob("nvidia/**/lib") for path in folder.iterdir()}
    there |= {path.name for path in packages.glob("torch/lib/*")} | {DRIVER}
    absent = sorted(name for name in wants.libraries - there if CUDA_LIBRARY.fullmatch(name))
    plan: dict[str, dict[str, set[str]]] = {name: {} for name in absent}
    for symbol, version in sorted(wants.symbols):
        if version:
            library = wants.versions.get(version)
        else:  # the loader takes it from whichever library has it
            library = absent[0] if absent and CUDA_SYMBOL.match(symbol) and symbol not in wants.own else None
        if library in plan:
            plan[library].setdefault(version, set()).add(symbol)
    return plan


def build(name: str, versions: dict[str, set[str]], folder: Path) -> int:
    """Compiles one stand-in into `folder` and returns how many functions it has.

    Raises:
        CalledProcessError: the compiler fails.
    """
    symbols = sorted(set().union(*versions.values()))
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "functions.c"), Path(scratch, "versions")
        source.write_text("".join(f"int {symbol}(void) {{ return {NO_DEVICE}; }}\n" for symbol in symbols))
        script.write_text(
            "".join(f"{version} {{ {'; '.join(sorted(names))}; }};\n" for version, names in versions.items() if version)
        )
        flags = ["-shared", "-fPIC", "-O1", "-w", "-fno-builtin", f"-Wl,-soname,{name}"]
        if any(versions):
            flags.append(f"-Wl,--version-script={script}")
        _run("cc", *flags, "-o", str(folder / name), str(source))
    return len(symbols)


def main() -> None:
    """Makes what is missing beside torch's own libraries, where they look first."""
    packages = Path(sys.argv[1])
    folder, wants = packages / "torch/lib", Wants()
    for library in sorted(folder.glob("lib*.so*")):
        wants.add(library)
    plan = missing(wants, packages)
    for name, versions in plan.items():
        build(name, versions, folder)
    print(f"stand-ins for {len(plan)} CUDA libraries: {' '.join(plan)}")


if __name__ == "__main__":
    main()
