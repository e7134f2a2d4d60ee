"""What the proxy can be told, checked. Opens nothing and imports no HTTP library; names are looked up at the start."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from pdkv.connectors.core.places import LOOPBACK, is_loopback
from pdkv.errors import ConfigError

_OPERATION = "proxy"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that `pdkv proxy` can be told.

    Attributes:
        prefill: Base URLs of the prefill instances, without a path.
        decode: Base URLs of the decode instances.
        allowed_hosts: Hosts and networks to which the proxy goes to give KV back, as answers of prefill instances name
            them; `"*"` is any. `None` is the hosts of its prefill instances.
        host: Where to listen.
        port: The port, 0 for any free one.
        insecure: Listen beyond loopback although nobody has to say who they are.
        skip_prefill_below_tokens: Prompts estimated shorter go to a decode instance alone; 0 splits every prompt.
        retries: How many further instances a leg may be sent to.
        fallback_to_decode: Send prompts to a decode instance alone while no prefill instance answers, instead of 503.
        connect_timeout_s: How long an instance may take to accept a connection.
        idle_timeout_s: How long either side may be silent before a request is given up; None waits for ever.
        probe_interval_s: Time between two probes of an instance, and how long a probe may take.
        drain_timeout_s: How long requests may go on after a signal to stop.
        max_body_bytes: The largest request body that is accepted.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    allowed_hosts: tuple[str, ...] | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    insecure: bool = False
    skip_prefill_below_tokens: int = 0
    retries: int = 2
    fallback_to_decode: bool = False
    connect_timeout_s: float = 5.0
    idle_timeout_s: float | None = 600.0
    probe_interval_s: float = 2.0
    drain_timeout_s: float = 30.0
    max_body_bytes: int = 8 << 20

    def checked(self) -> Settings:
        """Gives itself back, with the URLs in their plainest form.

        Raises:
            ConfigError: A setting makes no sense; names it and its value.
        """
        for name in ("skip_prefill_below_tokens", "retries", "drain_timeout_s"):
            _at_least(name, getattr(self, name), 0)
        for name in ("connect_timeout_s", "probe_interval_s", "idle_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"`{name}` is `{value}`, which is no time", operation=_OPERATION)
        _at_least("max_body_bytes", self.max_body_bytes, 1)
        for host in self.allowed_hosts or ():
            _check_place(host)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"`{self.port}` is no port", operation=_OPERATION)
        if not self.insecure and not _only_loopback(self.host):
            raise ConfigError(
                f"`{self.host}` is reachable from other hosts and the proxy asks nobody who they are",
                operation=_OPERATION,
                hint="listen on 127.0.0.1, or pass `--insecure` on a network you trust",
            )
        values = {
            **self.__dict__,
            "prefill": _urls("--prefill", self.prefill),
            "decode": _urls("--decode", self.decode),
        }
        return Settings(**values)

    def places(self) -> tuple[str, ...] | None:
        """Hosts and networks that the proxy may go to by itself; `None` is any. Looks the instances' names up."""
        if self.allowed_hosts is not None:
            return None if "*" in self.allowed_hosts else self.allowed_hosts
        hosts = [urlsplit(url).hostname or "" for url in self.prefill]
        for host in tuple(hosts):
            with suppress(OSError, UnicodeError):
                hosts += [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
        return (*dict.fromkeys(hosts), *(LOOPBACK if any(map(is_loopback, hosts)) else ()))


def _check_place(host: str) -> None:
    problem = "no host" if not host.strip() else ""
    if "/" in host:
        try:
            ipaddress.ip_network(host, strict=False)
        except ValueError as error:
            problem = f"no network: {error}"
    if problem:
        raise ConfigError(
            f"`--allowed-hosts` is `{host}`, which is {problem}",
            operation=_OPERATION,
            hint="give a host name, an address, a network such as 10.0.0.0/8, or `*` for any",
        )


def _at_least(name: str, value: float, least: int) -> None:
    if not value >= least:
        raise ConfigError(f"`{name}` is `{value}`, less than `{least}`", operation=_OPERATION)


def _only_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)} if host else set()
    except OSError as error:
        raise ConfigError(f"`{host}` is no address of this machine: {error}", operation=_OPERATION) from error
    return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)


def _urls(option: str, texts: Sequence[str]) -> tuple[str, ...]:
    if not texts:
        raise ConfigError(f"there is no `{option}`", operation=_OPERATION, hint="name at least one instance of each")
    urls = tuple(_url(option, text) for text in texts)
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"`{option}` names `{url}` twice", operation=_OPERATION)
    return urls


def _url(option: str, text: str) -> str:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"`{option}` is `{text}`, which is no URL: {error}", operation=_OPERATION) from error
    extra = parts.username or parts.password or parts.query or parts.fragment or parts.path.strip("/")
    if parts.scheme not in {"http", "https"} or not host or extra:
        raise ConfigError(
            f"`{option}` is `{text}`, not `http://HOST:PORT`",
            operation=_OPERATION,
            hint="give the address of the server alone, for example http://127.0.0.1:8100",
        )
    literal = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{literal}:{port}" if port else f"{parts.scheme}://{literal}"
