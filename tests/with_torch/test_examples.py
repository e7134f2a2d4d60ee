"""The examples with torch run as a user would run them, and prove what they say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from with_torch.ports import free_ports

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# What the output of each must contain, and how often; the others are run by tests/examples.
PROMISES = {"offline_pd.py": ("24 tokens equal to those of one process", 3)}


def test_every_example_with_torch_has_a_row():
    assert set(PROMISES) == {path.name for path in EXAMPLES.glob("*.py") if "import torch" in path.read_text()}


@pytest.mark.parametrize("example", PROMISES)
def test_example_runs_and_keeps_its_promise(example):
    command = [sys.executable, str(EXAMPLES / example), str(free_ports(2))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    text, times = PROMISES[example]
    assert done.stdout.count(text) == times


def test_tokens_of_the_offline_recipe_depend_on_what_is_transferred():
    spec = importlib.util.spec_from_file_location("offline_pd", EXAMPLES / "offline_pd.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    for tokens, table in recipe.sequences():
        model = recipe.Model()
        hidden = model.forward(tokens, 0, table)
        found = model.decode(hidden, len(tokens), table)
        for cache in model.caches:
            cache.zero_()
        assert model.decode(hidden, len(tokens), table) != found
