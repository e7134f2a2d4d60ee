"""The command line: `python -m gpu_check`, as `make gpu-check` calls it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_check import floors, picture, report, run, wheel
from gpu_check.arena import DRY
from gpu_check.outcome import FAILED, SKIPPED, Outcome
from gpu_check.steps import STEPS

Steps = Mapping[str, Mapping[str, Any]]
# Of the eight minutes that all of it may take: a last step that dies hard, and the picture, come on top.
BUDGET_S = 450.0
# A dry run shares a machine with whatever else runs there, and its deadlines are to end what hangs, not what is slow.
_DRY_PATIENCE = 6.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on the stand-in that PDKV_CUDA_LIBRARY names")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the JSON and the PNG")
    parser.add_argument(
        "--wheels", type=Path, default=Path("dist"), help="folder with wheels of pdkv and numpy, if not installed"
    )
    names = ", ".join(step.name for step in STEPS)
    parser.add_argument("--only", default="", help=f"names of steps, separated by commas: {names}")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all steps (default: %(default)g)")
    parser.add_argument("--step", choices=[step.name for step in STEPS], help=argparse.SUPPRESS)
    parser.add_argument("--step-budget", type=float, default=30.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.only.split(",") if name and name not in names.split(", ")]
    if unknown:
        parser.error(f"no step is called `{unknown[0]}`; there are {names}")
    return args


def main() -> int:
    """Runs all steps, or is one of them; gives the exit code."""
    args = _arguments()
    if args.step:
        step = next(step for step in STEPS if step.name == args.step)
        outcome = run.answer(step, args.step_budget)
        print(run.MARK + json.dumps(outcome.to_json(), default=str), flush=True)
        return 0
    began = time.monotonic()
    try:
        environment = _environment(args)
        if not args.dry:
            wheel.check_machine()
    except FileNotFoundError as error:
        print(f"gpu-check can't begin: {error}", file=sys.stderr)
        return 2
    only = [name for name in args.only.split(",") if name]

    def keep(steps: Steps) -> dict[str, Any]:
        """Writes what is known so far: whoever ends this run before its end finds it there."""
        judged = floors.judge(steps, dry=args.dry, whole=not only)
        found: dict[str, Any] = {
            "good": report.good(steps, judged, dry=args.dry),
            "without": report.without(steps),
            "dry": args.dry,
            "seconds": round(time.monotonic() - began, 1),
            "steps": steps,
            "table": report.table_rows(steps),
            "notes": report.notes(steps),
            "floors": [floor.to_json() for floor in judged],
        }
        run.write(found, args.out / "gpu-check.json")
        return found

    def tell(steps: Steps, name: str, outcome: Outcome, seconds: float) -> None:
        print(report.line(name, outcome, seconds), flush=True)
        keep({**steps, "the run": {"state": FAILED, "text": "it has not come to its end", "seconds": 0.0}})

    patience, late = (_DRY_PATIENCE, SKIPPED) if args.dry else (1.0, FAILED)
    steps = run.run(only, args.budget, environment, tell, patience=patience, late=late)
    whole = keep(steps)
    judged = floors.judge(steps, dry=args.dry, whole=not only)
    print(f"\n{report.tables(steps)}\n\n{report.floors(judged)}", flush=True)
    title = "pdkv gpu-check: " + (steps.get("machine", {}).get("facts", {}).get("loop", {}).get("name") or "no machine")
    try:
        drawn_by = picture.draw(whole["table"], title, args.out / "gpu-check.png")
    except Exception as error:  # noqa: BLE001 - the figures are worth more than their picture
        drawn_by = f"nothing: {type(error).__name__}: {error}"
    run.write({**whole, "drawn_by": drawn_by}, args.out / "gpu-check.json")
    word = "good" if whole["good"] else "NOT GOOD"
    without = f", without {', '.join(whole['without'])}" if whole["without"] else ""
    print(f"\n{word} after {whole['seconds']} s{without}: {args.out}/gpu-check.json, {args.out}/gpu-check.png")
    return 0 if whole["good"] else 1


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """What every step is told: where its packages are, and whether this is a dry run."""
    here = str(Path(__file__).resolve().parents[1])
    paths = [*map(str, wheel.folders(args.wheels)), here, os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path), DRY: "1" if args.dry else "0"}


if __name__ == "__main__":
    sys.exit(main())
