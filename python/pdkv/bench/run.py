"""Runs what the command line asked for, from the first connection to the written report."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdkv.bench import cli, control, floors, host, latency, lines, plot, producer, report, tensor_floors, ucxx_peer
from pdkv.bench.cases import Case
from pdkv.bench.latency import Figure
from pdkv.bench.lines import Line
from pdkv.bench.lookup import measure as lookup_measure
from pdkv.bench.measure import Bench
from pdkv.bench.pipe import asked
from pdkv.bench.pipe import measure as pipe_measure
from pdkv.bench.progress import progress
from pdkv.bench.rows import Row
from pdkv.bench.side import Toolkit
from pdkv.errors import ConfigError

_TICKS_OF_A_FIGURE = 4


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark; gives the exit code.

    Raises:
        PdkvError: It could not run.
    """
    _check(args)
    if args.role == "producer":
        if args.spawned:
            producer.serve_spawned(Toolkit.real(), insecure=args.insecure, timeout_s=args.timeout)
        else:
            producer.serve(Toolkit.real(), args.listen, insecure=args.insecure, timeout_s=args.timeout)
        return 0
    if args.suite == "floors":
        return _floors(args)
    runs = {"throughput": _throughput, "latency": _latency, "pipe": _pipe, "lookup": _lookup}
    return runs[args.mode](args)


def _check(args: argparse.Namespace) -> None:
    """Refuses contradictions before anything starts."""
    if args.role == "producer" and not args.spawned and args.listen is None:
        raise ConfigError("`--role producer` needs `--listen HOST:PORT`")
    if args.role == "consumer" and args.connect is None:
        raise ConfigError("`--role consumer` needs `--connect HOST:PORT`")
    if args.role != "producer" and args.listen is not None:
        raise ConfigError("`--listen` needs `--role producer`")
    if args.role != "consumer" and args.connect is not None:
        raise ConfigError("`--connect` needs `--role consumer`")
    if args.compare and (args.mode not in cli.PEERS or args.suite is not None):
        raise ConfigError("`--compare` has rates; leave it out with `--mode latency` or `lookup`, and with `--suite`")
    peers = cli.PEERS.get(args.mode, ())
    if unknown := [name for name in args.compare if name not in peers]:
        raise ConfigError(f"`{unknown[0]}` is no program to compare with", hint=f"use {', '.join(peers)}")
    if "ucxx" in args.compare:
        ucxx_peer.check()
    if args.plot is not None:
        if args.mode != "throughput" and args.suite is None:
            raise ConfigError(f"`--plot` draws rates of blocks; leave it out with `--mode {args.mode}`")
        plot.check(Path(args.plot))
    if args.output is not None and not Path(args.output).resolve().parent.is_dir():
        raise ConfigError(f"`{args.output}` is in no existing folder")


def _throughput(args: argparse.Namespace) -> int:
    cases = list(cli.axes(args).cases())
    rows: list[Row] = []
    with progress(len(cases) * args.iters) as (label, tick):
        for group in _by_place(cases):
            with _bench(args, inproc=group[0].transport == "inproc") as bench:
                bench.tick = tick
                for case in group:
                    label(case.label())
                    rows += bench.run(case)
    if args.plot is not None:
        plot.draw(rows, Path(args.plot))
    _show(args, rows)
    return 1 if any(row.wrong for row in rows) else 0


def _by_place(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Groups neighbours that share a producer: a process for all but `inproc`."""
    group: list[Case] = []
    for case in cases:
        if group and (case.transport == "inproc") != (group[0].transport == "inproc"):
            yield group
            group = []
        group.append(case)
    if group:
        yield group


def _latency(args: argparse.Namespace) -> int:
    transports = ["shm", "cma", "tcp"] if args.transport == ["auto"] else args.transport
    if "inproc" in transports:
        raise ConfigError("`--mode latency` measures between two processes", hint="use shm, cma or tcp")
    if "ucx" in transports:
        raise ConfigError("`--mode latency` does not measure `ucx` yet", hint="use shm, cma or tcp")
    with (
        progress(len(transports) * _TICKS_OF_A_FIGURE) as (label, tick),
        _bench(args, inproc=False) as bench,
    ):
        label("latency")
        bench.tick = tick
        figures = latency.measure_all(bench, transports, args.seed)
        figures.append(latency.idle_cpu(bench))
    lines = [["figure", "path", "median", "p99 or worst", "unit", "samples", "#wrong"]]
    lines += [
        [f.name, f.transport, f"{f.value:g}", f"{f.p99:g}", f.unit, str(f.samples), str(f.wrong)] for f in figures
    ]
    _write(args, _figures(args, figures, lines))
    return 1 if any(figure.wrong for figure in figures) else 0


def _figures(args: argparse.Namespace, figures: Sequence[Figure], lines: list[list[str]]) -> str:
    if args.format == "json":
        plain = [figure.to_json() for figure in figures]
        return json.dumps({"figures": plain, "host": host.facts(), "versions": host.versions()}, indent=1)
    if args.format == "csv":
        return "\n".join(",".join(cell.replace(",", "") for cell in line) for line in lines)
    return report.align(lines, left=2)


def _pipe(args: argparse.Namespace) -> int:
    plan = asked.plan(args)
    with progress(plan.steps(args.iters)) as (label, tick), _bench(args, inproc=False) as bench:
        bench.tick = tick
        measured = pipe_measure.run(bench, plan, label)
    return _show_lines(args, measured)


def _lookup(args: argparse.Namespace) -> int:
    prompts, cases = asked.prompts(args), list(cli.axes(args).cases())
    with progress((1 + len(cases)) * args.iters) as (label, tick), _bench(args, inproc=False) as bench:
        bench.tick = tick
        measured = lookup_measure.run(bench, prompts, cases, label)
    return _show_lines(args, measured)


def _show_lines(args: argparse.Namespace, measured: Sequence[Line]) -> int:
    if args.format == "json":
        _write(args, report.as_json(measured, host.facts()))
    elif args.format == "csv":
        _write(args, report.as_csv(measured))
    else:
        _write(args, f"{lines.as_text(measured)}\n\n{lines.summary(measured)}")
    return 1 if any(line.wrong for line in measured) else 0


def _floors(args: argparse.Namespace) -> int:
    threads = (args.threads or [host.default_threads()])[0]
    steps = floors.steps() + tensor_floors.steps()
    with progress(steps) as (label, tick), _bench(args, inproc=False) as bench:
        bench.tick = tick
        judged, rows = floors.run(bench, args.seed, threads, label)
        bench.tick = tick
        of_tensors, measured = tensor_floors.run(bench, args.seed, threads, label)
        judged += of_tensors
    if args.plot is not None:
        plot.draw(rows, Path(args.plot))
    cells = [floors.TITLES, *(floor.cells() for floor in judged)]
    if args.format == "json":
        plain = {"floors": [floor.to_json() for floor in judged], "tensors": [line.to_json() for line in measured]}
        text = report.as_json(rows, host.facts(), **plain)
    elif args.format == "csv":
        text = report.as_csv(rows)
    else:
        missed = sum(floor.ok is False for floor in judged)
        text = f"{report.align(cells, left=5)}\n\n{len(judged)} floors, {missed} missed"
    _write(args, text)
    if any(row.wrong for row in rows) or any(line.wrong for line in measured):
        return 1
    return 3 if args.strict and any(floor.ok is False for floor in judged) else 0


@contextmanager
def _bench(args: argparse.Namespace, *, inproc: bool) -> Iterator[Bench]:
    """Connects to the producer, or starts one."""
    kit = Toolkit.real()
    if args.role == "consumer":
        channel = control.connect(args.connect, args.timeout)
        try:
            channel.ask("hello", token="")
            yield _made(args, kit, channel)
        finally:
            channel.close()
    elif inproc:
        with producer.threaded(kit, args.timeout) as channel:
            yield _made(args, kit, channel)
    else:
        with producer.spawned(args.timeout) as channel:
            yield _made(args, kit, channel)


def _made(args: argparse.Namespace, kit: Toolkit, channel: control.Channel) -> Bench:
    return Bench(
        kit,
        channel,
        iters=args.iters,
        warmup=args.warmup,
        limits=not args.no_limit,
        compare=tuple(args.compare) if args.mode == "throughput" else (),
        insecure=args.insecure,
        timeout_s=args.timeout,
        quiet_wait_s=args.quiet_wait,
    )


def _show(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    if args.format == "json":
        _write(args, report.as_json(rows, host.facts()))
    elif args.format == "csv":
        _write(args, report.as_csv(rows))
    elif args.output is None and sys.stdout.isatty() and report.rich_installed():
        print(report.title(rows))
        report.print_rich(rows)
        print(report.summary(rows))
    else:
        width = shutil.get_terminal_size().columns if args.output is None and sys.stdout.isatty() else None
        _write(args, f"{report.title(rows)}\n\n{report.as_text(rows, width)}\n\n{report.summary(rows)}")


def _write(args: argparse.Namespace, text: str) -> None:
    if args.output is None:
        print(text)
        return
    try:
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write `{args.output}`: {error}") from error
