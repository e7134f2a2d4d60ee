"""What the command line asked for, as plans of `--mode pipe` and `--mode lookup`. Parses nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pdkv.bench import host, ucx
from pdkv.bench.lookup.prompts import Prompts
from pdkv.bench.pipe.exchange import SMALL_BYTES, Exchange, Way, installed_library
from pdkv.bench.pipe.measure import Plan
from pdkv.bench.pipe.peers import PEERS

TRANSPORTS = ("shm", "cma", "tcp")


def ways(args: argparse.Namespace) -> list[Way]:
    """Gives the ways that tensors go, one for each transport; `auto` is all that every machine has.

    Raises:
        ConfigError: A transport is none between two processes.
    """
    transports: Sequence[str] = TRANSPORTS if args.transport == ["auto"] else args.transport
    threads = (args.threads or [host.default_threads()])[0]
    use = ucx.Ucx(args.ucx_tls, args.ucx_one_sided, args.ucx_window, args.ucx_library)
    return [Way(transport, threads, args.streams, use) for transport in transports]


def plan(args: argparse.Namespace) -> Plan:
    """Gives the plan of `--mode pipe`.

    Raises:
        ConfigError: A value is unknown or impossible.
    """
    by, library = ways(args), installed_library()
    threads = by[0].threads
    return Plan(
        ways=by,
        large=Exchange(tuple(args.shape), args.dtype or "bfloat16", 2, library, threads, args.seed),
        small=Exchange((SMALL_BYTES,), "uint8", args.small, library, threads, args.seed) if args.small else None,
        peers=args.compare or tuple(PEERS),
        far=args.role == "consumer",
    )


def prompts(args: argparse.Namespace) -> Prompts:
    """Gives what is in the buffers of `--mode lookup`.

    Raises:
        ConfigError: A number is too small or absurdly large.
    """
    return Prompts(args.entries, args.tokens, installed_library(), args.seed)
