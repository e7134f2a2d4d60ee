"""Every example runs as a user would run it, and so does every block of the documents that imports pdkv."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Those with torch are run by tests/with_torch/test_examples.py.
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py") if "import torch" not in path.read_text())

# What the output of each example must contain; an example without a row fails.
PROMISES = {
    "lookup_buffer.py": ["decode-0: 48 tokens", "decode-1: 48 tokens", " 0 staged"],
    "two_processes.py": [" 0 staged"],
}


def blocks():
    """The Python blocks of the documents that are whole programs, by page and position.

    But those that want a GPU by name: what they call is called over the stand-in, by tests/with_gpu.
    """
    for page in sorted((ROOT / "docs").rglob("*.md")):
        found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        for number, block in enumerate(found):
            if "import pdkv" in block and 'device="cuda' not in block:
                yield pytest.param(block, id=f"{page.stem}-{number}")


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs_and_keeps_its_promise(example):
    done = run(ROOT / "examples" / example)
    assert done.returncode == 0, done.stderr
    for promise in PROMISES[example]:
        assert promise in done.stdout


@pytest.mark.parametrize("block", list(blocks()))
def test_block_of_the_documents_runs(block):
    done = run("-c", block)
    assert done.returncode == 0, done.stderr
