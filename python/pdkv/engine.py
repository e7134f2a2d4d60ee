"""The engine and everything it makes, under the names that users import.

The classes are native: between a call and the Rust core there is no Python. Their methods are described in
the stub `_core.pyi`.
"""

from pdkv._core import (
    Completions,
    Engine,
    Export,
    Issuer,
    KvCache,
    Link,
    Path,
    Peer,
    PipeBuffer,
    PipeReceiver,
    PipeSender,
    Pool,
    Reference,
    Region,
    RegionDescriptor,
    Shard,
    Span,
    Transfer,
    TransferStats,
)

__all__ = [
    "Completions",
    "Engine",
    "Export",
    "Issuer",
    "KvCache",
    "Link",
    "Path",
    "Peer",
    "PipeBuffer",
    "PipeReceiver",
    "PipeSender",
    "Pool",
    "Reference",
    "Region",
    "RegionDescriptor",
    "Shard",
    "Span",
    "Transfer",
    "TransferStats",
]
