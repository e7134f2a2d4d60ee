"""Where the time of a hand-over goes: two of vLLM's servers, asked as `vllm_first_token.py` does, with clocks in them.

    make vllm && .venv-vllm/bin/python benches/vllm_timeline.py --requests 10

For each prompt a load over pdkv, and then the same prompt from the consumer's own prefix cache, each cut into what it
passes through up to its first token: the medians of both, every other time with vLLM's own processes told to sleep
instead of polling. Beside that what every process took of the CPUs from a request to the end of its answer of four
tokens, and how long its threads stood ready for one, as the kernel tells.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_first_token import Asker, cache_bytes, prompts
from vllm_report import line
from vllm_setups import NOTES, ROOT, SLEEP

from with_vllm import models, settings
from with_vllm.engines import ASK
from with_vllm.servers import Server

Note = dict[str, Any]
# Milliseconds on the CPU, and ready without one.
Usage = dict[str, tuple[float, float]]

_KINDS = ("load", "cached", "load, asleep", "cached, asleep")
# The first ones connect, and have memory mapped.
_WARM_UPS = 2
# The ends of the parts of a request, in their order: what ends there, and how it is called.
_PARTS = {
    "arrived": "client to the scheduler: HTTP, vLLM's front, its queue",
    "carried": "the scheduler's step, to the order in the worker",
    "moved": "order to the end of the transfer, seen by the worker",
    "ended": "to the worker's report",
    "scheduled": "report to the step that computes",
    "computed": "that step",
    "first": "out of the worker to the client",
}


def _server(role: str, folder: Path, model: Path, arguments: Sequence[str], options: argparse.Namespace) -> Server:
    transfer = settings.transfer("pdkv", f"kv_{role}", **options.extra)
    transfer |= {"kv_connector": "ClockedConnector", "kv_connector_module_path": "vllm_clocked"}
    paths = [str(ROOT / "benches"), settings.ENVIRONMENT["PYTHONPATH"]]
    environment = {"PYTHONPATH": os.pathsep.join(paths), NOTES: notes(folder, role)}
    return Server(role, folder, model, transfer=transfer, environment=environment, arguments=arguments)


def notes(folder: Path, role: str) -> str:
    """The file of one server's notes."""
    return str(folder / f"{role}.notes")


def let_sleep(file: str, *, sleep: bool) -> None:
    """Has the processes that note into a file poll or sleep from now on."""
    told = Path(file + SLEEP)
    with told.open("r+b" if told.exists() else "wb") as beside:
        beside.write(bytes([sleep]))


def _tasks(server: Server) -> list[tuple[int, str, Path]]:
    """All threads of a server: their process, and what both are called."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != server.process.pid:
                continue
            name = (process / "comm").read_text().strip()
            for task in (process / "task").iterdir():
                thread = (task / "comm").read_text().strip()
                kind = thread if thread.startswith("pdkv") else "" if task.name == process.name else "others"
                found.append((int(task.name), f"{server.name} {name} {kind}".strip(), task / "schedstat"))
        except OSError:
            continue  # it has ended
    return found


def _usage(tasks: Sequence[tuple[int, str, Path]]) -> Usage:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for _, name, file in tasks:
        try:
            ran, waited, _ = file.read_text().split()
        except OSError:
            continue
        sums[name][0] += int(ran) / 1e6
        sums[name][1] += int(waited) / 1e6
    return {name: (ran, waited) for name, (ran, waited) in sums.items()}


def _less(after: Usage, before: Usage) -> Usage:
    zero = (0.0, 0.0)
    return {
        name: (ran - before.get(name, zero)[0], waited - before.get(name, zero)[1])
        for name, (ran, waited) in after.items()
    }


def cut(begun: float, took: float, found: Sequence[Note], name: str) -> dict[str, float]:
    """Milliseconds of each part of a request."""
    ends = {"first": begun + took}
    for note in found:
        if any(name in each for each in note["ids"]):
            ends.setdefault(note["what"], note["at"])
    parts, at = {}, begun
    for what in _PARTS:
        if what in ends:
            parts[what], at = 1e3 * (ends[what] - at), ends[what]
    return parts


def measure(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The parts and the CPU time of every load and of every answer from the prefix cache, by what `_KINDS` names."""
    model = getattr(models, options.model)()
    room = str(options.tokens + 64)
    arguments = ["--max-model-len", room, "--max-num-batched-tokens", room]
    arguments += ["--kv-cache-memory-bytes", str(cache_bytes(model, 2 * options.tokens + 4096))]
    roles = ("producer", "consumer")
    for role in roles:
        Path(notes(folder, role)).unlink(missing_ok=True)
        let_sleep(notes(folder, role), sleep=False)
    servers = [_server(role, folder, model, arguments, options) for role in roles]
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _KINDS}
    try:
        for server in servers:
            server.wait()
        producer, consumer = map(Asker, servers)
        for number, prompt in enumerate(prompts(2 * options.requests + _WARM_UPS, options.tokens, options.seed)):
            asleep = number % 2 == 1
            for role in roles:
                let_sleep(notes(folder, role), sleep=asleep)
            _, params = producer.whole(prompt, dict(ASK))
            tasks = [task for server in servers for task in _tasks(server)]
            for kind in ("load", "cached"):
                before = _usage(tasks)
                begun = time.perf_counter()
                took, _ = consumer.first(prompt, params if kind == "load" else None, name := f"{kind}-{number}-")
                usage = _less(_usage(tasks), before)
                if number >= _WARM_UPS:
                    row = {"name": name, "begun": begun, "took": took, "usage": usage}
                    rows[f"{kind}, asleep" if asleep else kind].append(row)
    finally:
        for server in servers:
            server.kill()
    found = [json.loads(text) for text in Path(notes(folder, "consumer")).read_text().splitlines()]
    for row in (row for each in rows.values() for row in each):
        row["parts"] = cut(row["begun"], row["took"], found, row["name"])
        row["transfer"] = next(
            (note for note in found if note["what"] == "moved" and row["name"] in note["ids"][0]), None
        )
    return rows


def report(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Both tables."""
    text = line(["part, ms", *_KINDS]) + line(["---"] * (1 + len(_KINDS)))

    def middles(of: Callable[[dict[str, Any]], float | None]) -> list[str]:
        found = [[value for row in rows[kind] if (value := of(row)) is not None] for kind in _KINDS]
        return [f"{statistics.median(values):.1f}" if values else "" for values in found]

    for part, words in _PARTS.items():
        text += line([words, *middles(lambda row, part=part: row["parts"].get(part))])
    text += line(["to the first token, in all", *middles(lambda row: 1e3 * row["took"])]) + "\n"
    for name in ("wire_us", "handover_us"):
        told = middles(lambda row, name=name: row["transfer"] and row["transfer"][name] / 1e3)
        text += f"{name.removesuffix('_us')}: {', '.join(filter(None, told))} ms\n"
    names = sorted({name for kind in _KINDS for row in rows[kind] for name in row["usage"]})
    for at, title in enumerate(("ran, ms", "stood ready, ms")):
        text += "\n" + line([title, *_KINDS]) + line(["---"] * (1 + len(_KINDS)))
        for name in names:
            cells = middles(lambda row, name=name, at=at: row["usage"].get(name, (0.0, 0.0))[at])
            if any(float(cell) >= 0.1 for cell in cells if cell):
                text += line([name, *cells])
    return text


def main() -> None:
    """Measures and tells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deep", choices=[made.__name__ for made in models.ALL])
    parser.add_argument("--requests", type=int, default=10, help="of each kind")
    parser.add_argument("--tokens", type=int, default=2049, help="of a prompt; one more than a multiple of 32")
    parser.add_argument("--extra", type=json.loads, default={}, help="settings of the connector, as JSON")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where logs and notes go, else nowhere")
    parser.add_argument("--output", type=Path, help="where the results go as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(folder, options)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1))
    print(report(found))
    print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
