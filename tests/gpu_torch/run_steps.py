"""The command of gpu-check with its steps in this one process, which loads torch once; none has a deadline."""

from __future__ import annotations

import os
import sys
from unittest import mock

from gpu_check import floors, run
from gpu_check.__main__ import main

_BUDGET_S = 600.0  # what a step plans with: no machine is so slow
_judge = floors.judge


def _answer(step, timeout_s, environment):
    with mock.patch.dict(os.environ, step.environment):
        return run.answer(step, _BUDGET_S)


def _judge_no_speed(steps, *, dry, whole):
    return _judge(steps, dry=True, whole=whole)


run.start, floors.judge = _answer, _judge_no_speed
sys.exit(main())
