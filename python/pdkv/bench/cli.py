"""The command line of `pdkv bench`. Parsing only; heavy imports wait until it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pdkv.bench import presets, sizes, ucx
from pdkv.errors import ConfigError, PdkvError

if TYPE_CHECKING:
    from pdkv.bench.cases import Axes

T = TypeVar("T")

DEFAULT_MODEL = "llama-3.1-8b"
_DEFAULT_ISL = 2048
MODES = ("throughput", "latency", "pipe", "lookup")
# What `--compare` takes, by mode.
PEERS = {"throughput": ("ucxx",), "pipe": ("gloo", "pickle")}

_EXAMPLES = """\
examples:
  pdkv bench                                             one machine, two processes, the best path
  pdkv bench --model llama-3.3-70b --isl 4096 --transport shm,cma,tcp
  pdkv bench --block-bytes 4KiB,16KiB,64KiB,1MiB --total 512MiB --transport cma --format csv
  pdkv bench --transport cuda --block-bytes 4KiB,16KiB,1MiB --total 1GiB
  pdkv bench --mode latency --transport shm,cma
  pdkv bench --mode pipe --shape 8,256,8,128 --transport shm,tcp
  pdkv bench --mode lookup --entries 1000
  pdkv bench --transport ucx --ucx-tls posix,cma --ucx-one-sided any --op write --isl 65536
  pdkv bench --transport shm,tcp --compare ucxx
  pdkv bench --suite floors --output floors.json --format json
  pdkv bench --role producer --listen 0.0.0.0:7000 --insecure         (first machine)
  pdkv bench --role consumer --connect 10.0.0.1:7000 --insecure       (second machine)

exit code: 0 every byte was right, 1 a byte was wrong, 2 it could not run, 3 a floor was missed with --strict
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds `bench` to the parsers of the `pdkv` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="move a real KV cache between two processes, check every byte, show the speed",
        description="Moves a KV cache between two processes, checks every byte, and shows how fast and by which path.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_arguments(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs `python -m pdkv.bench`."""
    parser = argparse.ArgumentParser(
        prog="pdkv bench", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_arguments(parser)
    return run(parser.parse_args(arguments))


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark that was asked for; gives the exit code."""
    from pdkv.bench import run as runner

    try:
        return runner.main(args)
    except PdkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--mode",
        choices=MODES,
        default=MODES[0],
        help="rates of blocks, short transfers, tensors through a pipe, or a lookup buffer (default: %(default)s)",
    )
    what.add_argument("--suite", choices=("floors",), help="measure everything pdkv promises and judge it")
    what.add_argument("--strict", action="store_true", help="with --suite: exit with 3 if a floor is missed")
    what.add_argument(
        "--op", type=_list(str), default=["pull"], metavar="OP,...", help="pull, push, read, write (default: pull)"
    )
    what.add_argument(
        "--transport",
        type=_list(str),
        default=["auto"],
        metavar="T,...",
        help="auto, inproc, cuda, shm, cma, tcp, ucx (default: auto)",
    )
    what.add_argument(
        "--iters",
        type=_item(sizes.parse_count),
        default=5,
        metavar="N",
        help="measured iterations; the median counts (default: %(default)s)",
    )
    what.add_argument(
        "--warmup", type=_item(_natural), default=1, metavar="N", help="iterations before that (default: %(default)s)"
    )
    what.add_argument("--no-limit", action="store_true", help="leave the limit rows out, and that of ucx_perftest")
    what.add_argument(
        "--compare",
        type=_list(str),
        default=[],
        metavar="PEER,...",
        help=f"move the same blocks by other programs too: {', '.join(PEERS['throughput'])} (needs pdkv[bench-peers]); "
        f"with --mode pipe the same tensors: {', '.join(PEERS['pipe'])} (default: both; they need torch)",
    )

    shape = parser.add_argument_group("geometry")
    shape.add_argument(
        "--model",
        type=_list(str),
        default=[DEFAULT_MODEL],
        metavar="NAME,...",
        help=f"{', '.join(presets.PRESETS)}, or custom (default: {DEFAULT_MODEL})",
    )
    shape.add_argument("--layers", type=_item(sizes.parse_count), metavar="N", help="of --model custom")
    shape.add_argument("--kv-heads", type=_item(sizes.parse_count), metavar="N", help="of --model custom")
    shape.add_argument("--head-dim", type=_item(sizes.parse_count), metavar="N", help="of --model custom")
    shape.add_argument(
        "--dtype", choices=tuple(presets.ITEM_BYTES), help="of --model custom and --shape (default: bfloat16)"
    )
    shape.add_argument(
        "--block-tokens",
        type=_list(sizes.parse_count),
        default=[16],
        metavar="N,...",
        help="tokens per block (default: 16)",
    )
    shape.add_argument(
        "--isl",
        type=_list(sizes.parse_count),
        default=[_DEFAULT_ISL],
        metavar="N,...",
        help=f"prompt tokens per request (default: {_DEFAULT_ISL})",
    )
    shape.add_argument(
        "--burst",
        type=_list(sizes.parse_count),
        default=[1],
        metavar="N,...",
        help="requests in flight at once (default: 1)",
    )
    shape.add_argument(
        "--block-bytes",
        type=_list(sizes.parse_size),
        metavar="SIZE,...",
        help="raw blocks of this size instead of a model, for example 4KiB,64KiB",
    )
    shape.add_argument(
        "--total",
        type=_item(sizes.parse_size),
        metavar="SIZE",
        help="bytes an iteration moves, with --block-bytes (default: 512MiB)",
    )
    shape.add_argument(
        "--layout",
        default="LBHNC",
        metavar="AXES",
        help="axes in memory, vLLM's letters: LBHNC, LBNHC, BLHNC, BLNHC (default: %(default)s)",
    )
    shape.add_argument(
        "--fragmentation", default="random", metavar="HOW", help="random, runs:N or none (default: %(default)s)"
    )
    shape.add_argument(
        "--slots-factor",
        type=float,
        default=1.5,
        metavar="X",
        help="pool blocks per moved block (default: %(default)s)",
    )
    shape.add_argument(
        "--memory",
        default="auto",
        metavar="KIND",
        help="who allocates pages: pool, private, adopt, cuda, or auto: what suits the transport (default: auto)",
    )
    shape.add_argument(
        "--seed", type=_item(_natural), default=1, metavar="N", help="draws tables and bytes (default: %(default)s)"
    )

    tensors = parser.add_argument_group("tensors of --mode pipe, entries of --mode lookup")
    tensors.add_argument(
        "--shape",
        type=_list(sizes.parse_count),
        default=[80, 2048, 8, 128],
        metavar="N,...",
        help="of each of the two large tensors (default: 80,2048,8,128)",
    )
    tensors.add_argument(
        "--small",
        type=_item(_natural),
        default=10_000,
        metavar="N",
        help="tensors of 1 KiB to send one after another, 0 for none (default: %(default)s)",
    )

    tensors.add_argument(
        "--entries",
        type=_item(sizes.parse_count),
        default=10_000,
        metavar="N",
        help="prompts in the buffer (default: %(default)s)",
    )
    tensors.add_argument(
        "--tokens", type=_item(sizes.parse_count), default=2048, metavar="N", help="of a prompt (default: %(default)s)"
    )

    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--threads",
        type=_list(sizes.parse_count),
        metavar="N,...",
        help="copy threads of each engine and of the limit (default: the cores, at most 4)",
    )
    machine.add_argument(
        "--streams",
        type=_item(sizes.parse_count),
        default=1,
        metavar="N",
        help="TCP streams of each transfer and of the limit (default: %(default)s)",
    )
    machine.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="deadline of every transfer (default: %(default)g)",
    )
    machine.add_argument(
        "--quiet-wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="before an iteration wait up to this long for other processes to rest (default: %(default)g)",
    )
    machine.add_argument(
        "--ucx-tls",
        default="",
        metavar="TLS",
        help="UCX's transports, of --transport ucx and what is measured beside it: posix,cma or tcp (default: ^tcp)",
    )
    machine.add_argument(
        "--ucx-one-sided",
        default=ucx.ONE_SIDED[0],
        metavar="WHEN",
        help=f"when UCX may put and get: {', '.join(ucx.ONE_SIDED)} (default: %(default)s)",
    )
    machine.add_argument(
        "--ucx-window",
        type=_item(sizes.parse_count),
        default=ucx.WINDOW,
        metavar="N",
        help="operations under way at once of the loops and of ucx_perftest (default: %(default)s)",
    )
    machine.add_argument("--ucx-library", default="", metavar="FILE", help="the libucp to use (default: a search)")
    machine.add_argument("--role", choices=("producer", "consumer"), help="run only one end; the consumer measures")
    machine.add_argument("--listen", metavar="HOST:PORT", help="with --role producer")
    machine.add_argument("--connect", metavar="HOST:PORT", help="with --role consumer")
    machine.add_argument(
        "--insecure", action="store_true", help="allow addresses beyond loopback: whoever reaches them can use them"
    )
    machine.add_argument("--spawned", action="store_true", help=argparse.SUPPRESS)

    output = parser.add_argument_group("output")
    output.add_argument(
        "--format", choices=("text", "csv", "json"), default="text", help="of the report (default: %(default)s)"
    )
    output.add_argument("--output", metavar="FILE", help="write the report there instead of stdout")
    output.add_argument("--plot", metavar="FILE", help="also draw it, as .png, .svg or .pdf (needs matplotlib)")


def axes(args: argparse.Namespace) -> Axes:
    """Turns parsed arguments into the axes of a run.

    Raises:
        ConfigError: Arguments contradict each other or a value is unknown.
    """
    from pdkv.bench import host
    from pdkv.bench.cases import Axes
    from pdkv.bench.tables import Fragmentation

    shape = {"--layers": args.layers, "--kv-heads": args.kv_heads, "--head-dim": args.head_dim, "--dtype": args.dtype}
    if args.block_bytes is not None:
        given = [name for name, value in shape.items() if value is not None]
        if given:
            raise ConfigError(f"`{given[0]}` contradicts `--block-bytes`", hint="raw blocks have no geometry")
        geometries = [presets.raw(size) for size in args.block_bytes]
    else:
        if args.total is not None:
            raise ConfigError(
                "`--total` needs `--block-bytes`", hint="a model's size follows from `--isl` and `--burst`"
            )
        geometries = [_geometry(name, shape) for name in args.model]
    return Axes(
        ops=tuple(args.op),
        transports=tuple(args.transport),
        geometries=tuple(geometries),
        block_tokens=tuple([1] if args.block_bytes else args.block_tokens),
        isl=tuple([1] if args.block_bytes else args.isl),
        bursts=tuple(args.burst),
        threads=tuple(args.threads or [host.default_threads()]),
        streams=args.streams,
        fragmentation=Fragmentation.parse(args.fragmentation),
        layout=args.layout,
        memory=args.memory,
        slots_factor=args.slots_factor,
        seed=args.seed,
        total=(args.total or 512 << 20) if args.block_bytes else None,
        ucx=ucx.Ucx(args.ucx_tls, args.ucx_one_sided, args.ucx_window, args.ucx_library),
    )


def _geometry(name: str, shape: dict[str, Any]) -> presets.Geometry:
    if name != "custom":
        given = [option for option, value in shape.items() if value is not None]
        if given:
            raise ConfigError(f"`{given[0]}` needs `--model custom`, not `{name}`")
        return presets.preset(name)
    missing = [option for option, value in shape.items() if value is None and option != "--dtype"]
    if missing:
        raise ConfigError(f"`--model custom` needs {', '.join(f'`{option}`' for option in missing)}")
    return presets.custom(shape["--layers"], shape["--kv-heads"], shape["--head-dim"], shape["--dtype"] or "bfloat16")


def _natural(text: str) -> int:
    return 0 if text == "0" else sizes.parse_count(text)


def _item(read: Callable[[str], T]) -> Callable[[str], T]:
    """Makes a reader's refusal one that argparse shows."""

    def wrapped(text: str) -> T:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(error.message) from error

    return wrapped


def _list(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    return _item(lambda text: sizes.parse_list(text, read))
