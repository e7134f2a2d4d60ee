"""Settings of a connector, as users write them into `kv_connector_extra_config`.

Checks types and ranges and names what is wrong; reads no environment. A key that pdkv doesn't know is left alone, since
one configuration often serves several connectors, unless it looks like a misspelt one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pdkv._core import transport_names
from pdkv.connectors.core.digest import signing_key
from pdkv.connectors.core.places import LOOPBACK, is_loopback
from pdkv.errors import ConfigError
from pdkv.ucx import UcxConfig

__all__ = ["Settings"]

_OPERATION = "connector settings"
_LAST_PORT = 65535
_SECRET_BYTES = 16
# No engine gives a longer lease.
_LEASE_S = 3600.0
# NIXL's, which one configuration may have beside pdkv's.
_NIXLS = frozenset(
    {
        "backends",
        "bidirectional_kv_xfer",
        "decoder_kv_blocks_ttl",
        "enforce_handshake_compat",
        "engine_ttl",
        "kv_recompute_threshold",
        "num_threads",
        "push_registration_timeout",
    }
)
_TEXTS = ("host", "require", "model_id", "secret_file")
_TELLING = ("secret", "allowed", "insecure", "lease", "timeout")
_log = logging.getLogger("pdkv.connectors")


@dataclass(frozen=True)
class Settings:
    """What can be set, with what holds when it is not.

    Attributes:
        host: Where the producer's directory and the ranks' engines listen, and what consumers are told. Beyond
            loopback only with `insecure`.
        port: Port of the directory, plus the data-parallel rank; 0 takes a free one.
        engine_port: Port of rank 0's engine; rank `r` takes `engine_port + r`, and data-parallel engines take the ports
            after one another's. 0 takes free ones.
        insecure: Listen beyond loopback without encryption or authentication: for networks that nobody else is on.
        allowed_hosts: Hosts and networks that a consumer may dial, as the parameters of a request name them; `"*"` is
            any. `None` is loopback and `host`, and with a `secret_file` any.
        secret_file: A file with a secret of 16 bytes or more, the same on all producers and consumers. Producers sign
            their answers with it, and consumers take no others.
        transports: Ways of moving bytes that may be used; `None` is all that this machine has.
        require: The only transport to use, or `"rdma"`; a pull that can't have it fails. `None` takes the best.
        threads: Copying threads of each rank's engine; `None` lets the engine choose.
        staging_bytes: Bytes of pinned memory through which the memory of each rank's GPU goes by `tcp`, where nothing
            touches it directly; 32 pages (128 KiB on most machines) or more. 0 refuses to; `None` lets the engine
            choose.
        staging_patience: Seconds that another instance may keep a part of that memory waiting, by not reading or not
            sending, while others wait for it; then that load ends. `None` lets the engine choose.
        verify_copies: Read back what a GPU has copied and compare checksums; wrong bytes end a load.
        kv_lease_duration: Seconds that a producer keeps blocks for a consumer that says nothing. Consumers renew at a
            third of it.
        transfer_timeout: Seconds that a load may take in all, from the order to the last byte.
        connect_timeout: Seconds within which a producer must answer.
        adopt: Move the cache's memory, if it is the CPU's, to where peers on the same host reach it faster.
        model_id: Name of the weights, the same on both sides; `None` is the name that the engine was started with.
        ucx: Fields of `pdkv.UcxConfig`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    engine_port: int = 0
    insecure: bool = False
    allowed_hosts: tuple[str, ...] | None = None
    secret_file: str | None = None
    transports: tuple[str, ...] | None = None
    require: str | None = None
    threads: int | None = None
    staging_bytes: int | None = None
    staging_patience: float | None = None
    verify_copies: bool = False
    kv_lease_duration: float = 30.0
    transfer_timeout: float = 60.0
    connect_timeout: float = 5.0
    adopt: bool = True
    model_id: str | None = None
    ucx: dict[str, Any] | None = None

    @classmethod
    def of(cls, extra_config: Mapping[str, Any], **defaults: Any) -> Settings:
        """Reads the keys that are pdkv's.

        Args:
            extra_config: What the user wrote.
            **defaults: Values for keys that the user left out.

        Raises:
            ConfigError: A value can't be; names the key, the value and what is accepted.
        """
        known = {field.name for field in fields(cls)}
        given = {**defaults, **{name: value for name, value in extra_config.items() if name in known}}
        for name in ("allowed_hosts", "transports"):
            if given.get(name) is not None:
                given[name] = _texts(name, given[name])
        settings = cls(**given)
        settings._check()
        _warn_of_others(set(extra_config) - known, known)
        return settings

    @property
    def places(self) -> tuple[str, ...] | None:
        """Hosts and networks that may be dialled; `None` is any."""
        if self.allowed_hosts is not None:
            return None if "*" in self.allowed_hosts else self.allowed_hosts
        return None if self.secret_file is not None else (*LOOPBACK, self.host)

    def signing_key(self) -> bytes | None:
        """What answers are signed with; reads the file.

        Raises:
            ConfigError: It can't be read, or is too short.
        """
        if self.secret_file is None:
            return None
        try:
            secret = Path(self.secret_file).read_bytes().strip()
        except OSError as error:
            raise _bad("secret_file", self.secret_file, f"it can't be read: {error.strerror}") from error
        if len(secret) < _SECRET_BYTES:
            raise _bad("secret_file", self.secret_file, f"its content has `{len(secret)}` bytes, 16 are the least")
        return signing_key(secret)

    def of_replica(self, index: int, ranks: int) -> Settings:
        """The settings of one of several engines that were started with the same ones.

        Args:
            index: Which: its data-parallel rank.
            ranks: Ranks of each.

        Raises:
            ConfigError: A port is beyond the last one.
        """
        port = self.port and self.port + index
        engine_port = self.engine_port and self.engine_port + index * ranks
        if port > _LAST_PORT:
            raise _bad("port", port, f"it is moved on by `{index}`, this engine's data-parallel rank")
        if engine_port and engine_port + ranks - 1 > _LAST_PORT:
            raise _bad("engine_port", engine_port, f"this engine needs `{ranks}` ports from there on")
        return replace(self, port=port, engine_port=engine_port)

    def ucx_config(self) -> UcxConfig | None:
        """The settings of the `ucx` transport, or `None` for its defaults.

        Raises:
            ConfigError: One is bad, or `UcxConfig` has no such field.
        """
        given: Any = self.ucx
        if given is None:
            return None
        known = {field.name for field in fields(UcxConfig)}
        if not isinstance(given, dict) or not known.issuperset(given):
            raise _bad("ucx", given, f"give an object with {', '.join(f'`{name}`' for name in sorted(known))}")
        return UcxConfig(**given)

    def _check(self) -> None:
        for name in ("kv_lease_duration", "transfer_timeout", "connect_timeout", "staging_patience"):
            value = getattr(self, name)
            if value is None and name == "staging_patience":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise _bad(name, value, "give seconds, more than 0")
        if self.kv_lease_duration > _LEASE_S:
            raise _bad("kv_lease_duration", self.kv_lease_duration, "give 3600 at most: consumers that live renew it")
        for name in ("port", "engine_port"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LAST_PORT:
                raise _bad(name, value, "give a port, or 0 for any free one")
        for name in ("insecure", "adopt", "verify_copies"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise _bad(name, value, "give true or false")
        host: Any = self.host
        if not isinstance(host, str) or not host:
            raise _bad("host", host, "give a host name or an address of this machine")
        if self.host in ("0.0.0.0", "::"):
            raise _bad("host", self.host, "consumers are told this host: give the one that they can reach")
        if not self.insecure and not is_loopback(self.host):
            raise _bad(
                "host",
                self.host,
                'beyond loopback anybody who can connect may ask: say `"insecure": true` if that is meant',
            )
        threads: Any = self.threads
        if threads is not None and (type(threads) is not int or threads < 1):
            raise _bad("threads", threads, "give a number of threads, 1 or more, or leave it out")
        staging: Any = self.staging_bytes
        if staging is not None and (type(staging) is not int or not 0 <= staging < 1 << 63):
            raise _bad("staging_bytes", staging, "give a number of bytes, 0 for none, or leave it out")
        for name in ("require", "model_id", "secret_file"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise _bad(name, value, "give a text, or leave it out")
        self._check_transports()
        self.ucx_config()

    def _check_transports(self) -> None:
        known = transport_names()
        if self.transports is not None and not (self.transports and set(self.transports) <= set(known)):
            raise _bad("transports", list(self.transports), f"give some of {_listed(known)}, best first")
        usable = [*(known if self.transports is None else self.transports), "rdma"]
        if self.require is not None and self.require not in usable:
            raise _bad("require", self.require, f"give one of {_listed(usable)}, or leave it out")


def _warn_of_others(others: set[str], known: set[str]) -> None:
    """Refuses what looks like a misspelt key of pdkv's; whatever else is there may be somebody else's."""
    for name in sorted(others - _NIXLS):
        # Half of a name is enough where it matters who may do what, and for how long.
        telling = [key for key in sorted(known) if any(word in name and word in key for word in _TELLING)]
        if close := get_close_matches(name, known, n=1, cutoff=0.75) or telling:
            text = f"kv_connector_extra_config has no key `{name}`"
            raise ConfigError(text, operation=_OPERATION, hint=f"is `{close[0]}` meant?")
        _log.warning("pdkv leaves `%s` in kv_connector_extra_config alone: it has no such key", name)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise _bad(name, value, 'give a list, such as ["a", "b"]')
    return tuple(value)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _bad(name: str, value: object, hint: str) -> ConfigError:
    shown = f"the text `{value}`" if isinstance(value, str) and name not in _TEXTS else f"`{value}`"
    return ConfigError(f"`{name}` is {shown}", operation=_OPERATION, hint=hint)
