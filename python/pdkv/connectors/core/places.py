"""Which hosts a consumer may dial. Decides only; looks nothing up.

A directory's host comes with a request, from whoever sent it, and an engine's address comes from the directory. So
neither is believed to be a place worth connecting to: `allowed_hosts` says where requests may lead at all, and without
it a directory may name ports of its own host only.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from pdkv.connectors.core.shown import shown
from pdkv.errors import PeerUnreachableError

__all__ = ["LOOPBACK", "Places", "is_loopback"]

_OPERATION = "dial"
# This host, as it is called from here.
LOOPBACK = ("127.0.0.0/8", "::1", "localhost")


class Places:
    """The hosts that may be dialled.

    Args:
        allowed: Names, addresses and networks such as `10.0.0.0/8`. `None` allows every directory, and of engines those
            on their directory's host. Names are compared, not looked up.
    """

    def __init__(self, allowed: Iterable[str] | None) -> None:
        self._open = allowed is None
        self._names = set[str]()
        self._networks = list[IPv4Network | IPv6Network]()
        for host in allowed or ():
            try:
                self._networks.append(ip_network(_bare(host), strict=False))
            except ValueError:
                self._names.add(_name(host))

    def check_directory(self, host: str) -> None:
        """Checks the host of a directory.

        Raises:
            PeerUnreachableError: It may not be dialled.
        """
        if not self._open and not self._allows(host):
            raise _refusal(host, "is not among `allowed_hosts`", "add the producer's host to `allowed_hosts`")

    def engine_address(self, told: str, directory_host: str, reached: str) -> str:
        """Gives the address at which to dial an engine.

        Args:
            told: `host:port`, as the directory told it.
            directory_host: The directory's host, as the request named it.
            reached: The address at which the directory was reached.

        Raises:
            PeerUnreachableError: It may not be dialled, or is no address.
        """
        host, port = _split(told)
        if host in ("0.0.0.0", "::") or _name(host) in (_name(directory_host), _name(reached)):
            # Also one that listens everywhere. The address is dialled and not the name, which may stand for another one
            # by now, and takes its time to be looked up.
            host = reached
        elif self._open:
            text = f"is not the directory's, `{shown(directory_host)}`"
            raise _refusal(host, text, "name the hosts of all producers in `allowed_hosts`")
        elif not self._allows(host):
            raise _refusal(host, "is not among `allowed_hosts`", "add the hosts of all the producer's ranks to it")
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _allows(self, host: str) -> bool:
        try:
            address = ip_address(_bare(host).partition("%")[0])
        except ValueError:
            return _name(host) in self._names
        return any(address in network for network in self._networks)


def is_loopback(host: str) -> bool:
    """Whether a host is this one and reached from here alone, by its name: nothing is looked up."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return _name(host) == "localhost"


def _split(told: str) -> tuple[str, int]:
    host, colon, port = told.rpartition(":")
    # What `int` accepts is more than a port.
    if not colon or not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16):
        raise _refusal(told, "is no `host:port`", "is the directory that of a producer of this release?")
    return _bare(host), int(port)


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _name(host: str) -> str:
    """One spelling for each host."""
    bare = _bare(host)
    try:
        return str(ip_address(bare))
    except ValueError:
        return bare.rstrip(".").lower()


def _refusal(host: str, why: str, hint: str) -> PeerUnreachableError:
    return PeerUnreachableError(f"`{shown(host)}` {why}", operation=_OPERATION, retryable=False, hint=hint)
