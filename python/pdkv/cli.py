"""The `pdkv` command. Parsing only: each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pdkv._core import build_info
from pdkv.bench import cli as bench
from pdkv.errors import PdkvError
from pdkv.proxy import cli as proxy

_DESCRIPTION = "Moves the KV cache of LLM requests between prefill and decode engines."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; gives the exit code."""
    parser = argparse.ArgumentParser(prog="pdkv", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=build_info(), help="like `pdkv version`")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    bench.add_parser(commands).set_defaults(run=bench.run)
    _add_explain(commands)
    doctor = commands.add_parser(
        "doctor",
        help="look at this machine and say which transports would work here",
        description="Looks at this machine, tries every transport between two processes, and says what it found. "
        "The exit code is 1 if something that pdkv cannot do without is bad, else 0, whatever the notes say.",
    )
    doctor.add_argument(
        "--format", choices=("text", "json"), default="text", help="how to print it (default %(default)s)"
    )
    doctor.set_defaults(run=_doctor)
    proxy.add_parser(commands)
    version = commands.add_parser("version", help="show the version and how it was built")
    version.set_defaults(run=_version)
    args = parser.parse_args(arguments)
    try:
        code: int = args.run(args)
    except PdkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="plan a transfer without doing it, and say what it would cost and why",
        description="Plans how blocks of one layout become blocks of another, or says which transports reach a peer. "
        "Moves nothing and allocates no cache.",
    )
    parser.set_defaults(run=_explain)
    parser.add_argument(
        "--src", default="LBHNC", metavar="ORDER", help="memory order of the source (default %(default)s)"
    )
    parser.add_argument("--dst", default="LBHNC", metavar="ORDER", help="memory order of the destination")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (default %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads (default %(default)s)")
    parser.add_argument("--content", type=int, default=256, help="elements of one token and head (default %(default)s)")
    parser.add_argument("--item-bytes", type=int, choices=(1, 2, 4), default=2, help="bytes of an element")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens in a block (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=128, help="blocks to move (default %(default)s)")
    parser.add_argument(
        "--runs", type=int, default=1, help="length of the runs of neighbouring blocks (default %(default)s)"
    )
    parser.add_argument("--connect", metavar="HOST:PORT", help="say instead which transports reach this pdkv.Engine")


def _explain(args: argparse.Namespace) -> int:
    from pdkv import explain

    if args.connect:
        print(explain.links(args.connect))
        return 0
    shape = explain.Shape(args.layers, args.kv_heads, args.block_tokens, args.content, args.item_bytes)
    print(explain.transfer(shape, args.src, args.dst, args.blocks, args.runs))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    import json

    from pdkv import doctor

    examination = doctor.examine()
    print(json.dumps(examination.as_json(), indent=2) if args.format == "json" else examination.as_text())
    return 0 if examination.good else 1


def _version(_: argparse.Namespace) -> int:
    print(build_info())
    return 0


if __name__ == "__main__":
    sys.exit(main())
