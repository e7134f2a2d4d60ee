"""Network interfaces and RDMA devices, as the kernel shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdkv.doctor.finding import Finding

__all__ = ["examine"]


def examine(root: Path) -> tuple[list[Finding], dict[str, Any]]:
    """Looks at the interfaces and devices below `root`; gives findings, and the same as data."""
    everything = [_nic(folder) for folder in _folders(root / "sys/class/net")]
    nics = [nic for nic in everything if nic["name"] != "lo"]
    loopback = next((nic["state"] for nic in everything if nic["name"] == "lo"), "absent")
    ports = [
        _port(device.name, folder)
        for device in _folders(root / "sys/class/infiniband")
        for folder in _folders(device / "ports")
    ]
    reachable = any((root / "dev/infiniband").glob("uverbs*"))
    facts = {"nics": nics, "rdma_ports": ports, "rdma_reachable": reachable}
    return [*_loopback(loopback), _nics(nics), *_rdma(ports, reachable=reachable)], facts


def _loopback(state: str) -> list[Finding]:
    if state in ("up", "unknown"):  # it is up, and its driver does not know more
        return []
    text = f"the loopback is {state}: engines of this host cannot connect to one another"
    return [Finding("network", good=False, text=text, hint="`ip link set lo up`")]


def _nics(nics: list[dict[str, Any]]) -> Finding:
    if not nics:
        return Finding(
            "network",
            good=False,
            text="no interface but the loopback",
            hint="peers on other hosts can't be reached; a container may need another network",
        )
    words = [
        f"`{nic['name']}` {nic['state']}" + (f" at {nic['speed_mbps'] / 1000:g} Gb/s" if nic["speed_mbps"] else "")
        for nic in nics
    ]
    up = any(nic["state"] in ("up", "unknown") for nic in nics)
    return Finding("network", good=up, text=", ".join(words), hint=None if up else "`ip link` shows why none is up")


def _rdma(ports: list[dict[str, Any]], *, reachable: bool) -> list[Finding]:
    if not ports:
        return [
            Finding(
                "rdma",
                good=False,
                text="no device: transfers between hosts go over tcp",
                hint="an adapter for InfiniBand, RoCE or EFA shows in /sys/class/infiniband once its driver is loaded",
            )
        ]
    findings = [
        Finding(
            "rdma",
            good=port["state"] == "ACTIVE",
            text=f"`{port['device']}:{port['port']}` is {port['state']}, {port['rate']}, {port['link_layer']}",
            hint=None if port["state"] == "ACTIVE" else "look at cable, switch and subnet manager; `ibstat` says more",
        )
        for port in ports
    ]
    if not reachable:
        findings.append(
            Finding(
                "rdma",
                good=False,
                text="there are devices, but no /dev/infiniband/uverbs* to use them by",
                hint="load `ib_uverbs`; a container needs `--device=/dev/infiniband` and a memlock limit",
            )
        )
    return findings


def _nic(folder: Path) -> dict[str, Any]:
    speed = _read(folder / "speed")
    return {
        "name": folder.name,
        "state": _read(folder / "operstate") or "unknown",
        # -1 where the driver does not know; virtual interfaces refuse to say.
        "speed_mbps": int(speed) if speed and int(speed) > 0 else None,
    }


def _port(device: str, folder: Path) -> dict[str, Any]:
    return {
        "device": device,
        "port": folder.name,
        "state": (_read(folder / "state") or "unknown").split(": ")[-1],
        "rate": _read(folder / "rate") or "rate unknown",
        "link_layer": _read(folder / "link_layer") or "link layer unknown",
    }


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
