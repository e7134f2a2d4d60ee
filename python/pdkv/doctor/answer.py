"""The child that `child.py` asks: `python -m pdkv.doctor.answer QUESTION ARGUMENT...`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from pdkv import _core
from pdkv.doctor import gpu_trial, trial
from pdkv.doctor.child import MARK
from pdkv.errors import PdkvError


def _answers(question: str, *arguments: str) -> Iterator[dict[str, Any]]:
    if question == "cuda":
        yield _core.cuda_probe()
    elif question == "gpu trial":
        yield from gpu_trial.moves()
        yield from gpu_trial.kernels()
    elif question == "ucx":
        try:
            yield _core.ucx_probe(*arguments)
        except PdkvError as error:
            yield {"error": error.message, "hint": error.hint}
    else:
        yield from trial.moves()


if __name__ == "__main__":
    for facts in _answers(*sys.argv[1:]):
        sys.stdout.write(f"{MARK}{json.dumps(facts)}\n")
        sys.stdout.flush()
