"""The set-ups that `vllm_handover.py` compares: which connector moves the KV cache, and how it is set.

Importing this makes the machinery of `tests/with_vllm` importable. Knows nothing of what is measured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in (str(ROOT / "tests"), str(ROOT / "benches")) if path not in sys.path]

# For `vllm_clocked.py`: the variable that names the file of its notes, and what the file beside it has after its name.
NOTES, SLEEP = "BENCH_TIMELINE", ".sleep"

# What UCX does when nobody sets anything, said aloud because the tests' environment says otherwise.
_UCX_DEFAULTS = {"UCX_TLS": "all", "UCX_NET_DEVICES": "all"}


@dataclass(frozen=True)
class Setup:
    """One way to hand over.

    Attributes:
        name: How it is called.
        connector: `pdkv` or `nixl`.
        about: How it is set, in words.
        extra: vLLM's `kv_connector_extra_config`.
        environment: Variables of both engines.
    """

    name: str
    connector: str
    about: str
    extra: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def transfer(self, role: str) -> dict[str, Any]:
        """What vLLM takes as `--kv-transfer-config`, for the `producer` or the `consumer`."""
        from with_vllm import settings

        found: dict[str, Any] = settings.transfer(self.connector, f"kv_{role}", **self.extra)
        return found


SETUPS = {
    setup.name: setup
    for setup in (
        Setup("pdkv", "pdkv", "PdkvConnector, its defaults"),
        Setup("nixl", "nixl", "NixlConnector, its defaults and UCX's", environment=_UCX_DEFAULTS),
        Setup(
            "nixl-0",
            "nixl",
            "NixlConnector with `num_threads` 0: fewer threads beside the engine's",
            {"num_threads": 0},
            _UCX_DEFAULTS,
        ),
        # Their reads need the producer's help, so they wait when it stands still.
        Setup("nixl-tcp", "nixl", "NixlConnector over `UCX_TLS=tcp`", environment={"UCX_TLS": "tcp"}),
    )
}
