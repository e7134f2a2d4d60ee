"""Moves the KV cache of LLM requests between prefill and decode engines.

Start with `pdkv.Engine`. Importing this package imports neither torch nor numpy.
"""

from pdkv._core import KvLayout, Plan, __version__, build_info, plan, resolve_layout
from pdkv.engine import (
    Completions,
    Engine,
    Export,
    Issuer,
    KvCache,
    Link,
    Path,
    Peer,
    Pool,
    Reference,
    Region,
    RegionDescriptor,
    Shard,
    Span,
    Transfer,
    TransferStats,
)
from pdkv.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    DeviceError,
    HandshakeError,
    IntegrityError,
    InternalError,
    LayoutError,
    PdkvError,
    PeerError,
    PeerLostError,
    PeerUnreachableError,
    ReferenceDigestError,
    ReferenceExpiredError,
    ReferenceFingerprintError,
    ReferenceForgedError,
    ReferenceMismatchError,
    ReferenceReleasedError,
    ReferenceRestartedError,
    ReferenceUnknownError,
    ReferenceUsedError,
    RegionError,
    StaleReferenceError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
    UnsupportedError,
)

TYPE_CHECKING = False  # as in `errors.py`
if TYPE_CHECKING:
    from pdkv.layout import Layout
    from pdkv.lookup_buffer import KVStore, LookupBuffer
    from pdkv.pipe import Pipe
    from pdkv.ucx import UcxConfig

__all__ = [
    "CapacityError",
    "ClosedError",
    "Completions",
    "ConfigError",
    "DeviceError",
    "Engine",
    "Export",
    "HandshakeError",
    "IntegrityError",
    "InternalError",
    "Issuer",
    "KVStore",
    "KvCache",
    "KvLayout",
    "Layout",
    "LayoutError",
    "Link",
    "LookupBuffer",
    "Path",
    "PdkvError",
    "Peer",
    "PeerError",
    "PeerLostError",
    "PeerUnreachableError",
    "Pipe",
    "Plan",
    "Pool",
    "Reference",
    "ReferenceDigestError",
    "ReferenceExpiredError",
    "ReferenceFingerprintError",
    "ReferenceForgedError",
    "ReferenceMismatchError",
    "ReferenceReleasedError",
    "ReferenceRestartedError",
    "ReferenceUnknownError",
    "ReferenceUsedError",
    "Region",
    "RegionDescriptor",
    "RegionError",
    "Shard",
    "Span",
    "StaleReferenceError",
    "Transfer",
    "TransferCancelledError",
    "TransferError",
    "TransferStats",
    "TransferTimeoutError",
    "UcxConfig",
    "UnsupportedError",
    "__version__",
    "build_info",
    "plan",
    "resolve_layout",
]


def __getattr__(name: str) -> object:
    """Imports what is seldom needed when it is asked for."""
    if name == "Layout":
        from pdkv.layout import Layout

        return Layout
    if name == "Pipe":
        from pdkv.pipe import Pipe

        return Pipe
    if name in ("KVStore", "LookupBuffer"):
        from pdkv import lookup_buffer

        return getattr(lookup_buffer, name)
    if name == "UcxConfig":
        from pdkv.ucx import UcxConfig

        return UcxConfig
    raise AttributeError(f"module 'pdkv' has no attribute '{name}'")
