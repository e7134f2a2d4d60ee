"""The command line of `pdkv proxy`. Parsing only; the HTTP library is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from pdkv.errors import UnsupportedError
from pdkv.proxy.settings import Settings

_EXAMPLE = """\
example:
  pdkv proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

It looks after one machine and tests. Beyond that take vllm-router, Dynamo or llm-d: docs/guides/proxy.md.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds `proxy` to the parsers of the `pdkv` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "proxy",
        help="route OpenAI requests over prefill and decode instances of one machine",
        description="Gives the prompt of each request to a prefill instance and the rest to a decode instance.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    url: dict[str, Any] = {"action": "append", "metavar": "URL", "required": True}
    parser.add_argument("--prefill", help="an instance that prefills, http://HOST:PORT; may be repeated", **url)
    parser.add_argument("--decode", help="an instance that decodes; may be repeated", **url)
    parser.add_argument("--host", default=Settings.host, help="where to listen (default %(default)s)")
    parser.add_argument("--port", type=int, default=Settings.port, help="0 takes a free one (default %(default)s)")
    parser.add_argument("--insecure", action="store_true", help="listen beyond loopback, where anybody may ask")
    parser.add_argument(
        "--allowed-hosts",
        action="append",
        metavar="HOST",
        help="a host or network (10.0.0.0/8) that a prefill instance's answer may name, to give KV back to that nobody "
        "fetches, or `*`; may be repeated (default: the hosts of the prefill instances)",
    )
    parser.add_argument(
        "--skip-prefill-below",
        type=int,
        default=Settings.skip_prefill_below_tokens,
        metavar="TOKENS",
        help="prompts shorter than this go to a decode instance alone; text counts 4 characters a token "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--retries", type=int, default=Settings.retries, help="further instances to try for a leg (default %(default)s)"
    )
    parser.add_argument(
        "--fallback-to-decode",
        action="store_true",
        help="while no prefill instance answers, send prompts to a decode instance alone instead of answering 503",
    )
    _add_limits(parser)
    parser.set_defaults(run=run)
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    seconds: dict[str, Any] = {"type": float, "metavar": "SECONDS"}
    parser.add_argument(
        "--connect-timeout",
        default=Settings.connect_timeout_s,
        help="to reach an instance (default %(default)s)",
        **seconds,
    )
    parser.add_argument(
        "--idle-timeout",
        default=Settings.idle_timeout_s,
        help="silence of an instance or a client that ends a request, 0 for never; an answer that is not streamed "
        "is silent until it is whole (default %(default)s)",
        **seconds,
    )
    parser.add_argument(
        "--probe-interval",
        default=Settings.probe_interval_s,
        help="between two looks at /health (default %(default)s)",
        **seconds,
    )
    parser.add_argument(
        "--drain-timeout",
        default=Settings.drain_timeout_s,
        help="that requests may go on after SIGTERM (default %(default)s)",
        **seconds,
    )
    parser.add_argument(
        "--max-body",
        type=int,
        default=Settings.max_body_bytes,
        metavar="BYTES",
        help="of a request (default %(default)s)",
    )


def settings(args: argparse.Namespace) -> Settings:
    """What the options say, checked.

    Raises:
        ConfigError: An option makes no sense.
    """
    return Settings(
        prefill=tuple(args.prefill),
        decode=tuple(args.decode),
        allowed_hosts=None if args.allowed_hosts is None else tuple(args.allowed_hosts),
        host=args.host,
        port=args.port,
        insecure=args.insecure,
        skip_prefill_below_tokens=args.skip_prefill_below,
        retries=args.retries,
        fallback_to_decode=args.fallback_to_decode,
        connect_timeout_s=args.connect_timeout,
        idle_timeout_s=args.idle_timeout or None,
        probe_interval_s=args.probe_interval,
        drain_timeout_s=args.drain_timeout,
        max_body_bytes=args.max_body,
    ).checked()


def run(args: argparse.Namespace) -> int:
    """Serves until a signal.

    Raises:
        UnsupportedError: The HTTP library is not installed.
    """
    checked = settings(args)
    try:
        from pdkv.proxy import serve
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in {"aiohttp", "prometheus_client"}:
            raise
        raise UnsupportedError(
            f"`{missing.name}` is not installed", operation="proxy", hint="pip install 'pdkv[proxy]'"
        ) from missing
    import logging

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serve.run(checked, lambda url: print(f"pdkv proxy listens on {url}", flush=True))
    return 0
