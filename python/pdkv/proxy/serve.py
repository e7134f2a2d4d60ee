"""Runs a proxy in this process until a signal ends it. Listens, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from collections.abc import Callable

from aiohttp import web

from pdkv.errors import ConfigError
from pdkv.proxy.app import Proxy
from pdkv.proxy.settings import Settings

_BACKLOG = 1024  # clients that come at once, before they are accepted


def run(settings: Settings, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT, and then lets running requests end; a second signal ends them. Blocks.

    Args:
        settings: Checked settings.
        announce: Is given the URL once the proxy listens and knows who is there.

    Raises:
        ConfigError: Nobody can listen there.
    """
    _allow_many_connections()
    asyncio.run(_run(settings, announce))


def make_runner(proxy: Proxy, *, shutdown_timeout_s: float) -> web.AppRunner:
    """What serves a proxy: unpacks nothing, and ends a handler whose client has left."""
    return web.AppRunner(
        proxy.app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=shutdown_timeout_s,
        auto_decompress=False,  # a packed body may be a thousand times as large; it is refused
    )


def _allow_many_connections() -> None:
    """Lets this process open as many as it may: each request needs two, and the usual limit is 1024 files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # then fewer requests run at once
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _run(settings: Settings, announce: Callable[[str], None]) -> None:
    stop, cut = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (cut if stop.is_set() else stop).set())
    proxy = Proxy(settings)
    runner = make_runner(proxy, shutdown_timeout_s=1.0)
    await runner.setup()
    try:
        await proxy.start()
        site = web.TCPSite(runner, settings.host, settings.port, backlog=_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"cannot listen: {error}", operation="proxy") from error
        host, port = runner.addresses[0][:2]
        announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        await stop.wait()
        await site.stop()
        await proxy.drain(cut)
    finally:
        await proxy.stop()
        await runner.cleanup()
