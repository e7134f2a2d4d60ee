"""The one tree of exceptions that pdkv raises.

Every class here carries the same facts: what went wrong (`kind`), what died with it (`scope`),
whether trying again can help (`retryable`), which call met it (`operation`), the values involved
(`context`) and what to do about it (`hint`). The table of kinds lives in the Rust core; a test
compares the two. This module needs no native code, so errors can be unpickled anywhere.
"""

from __future__ import annotations

TYPE_CHECKING = False  # the name is known to type checkers; `typing` itself would double the import time
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "HandshakeError",
    "IntegrityError",
    "InternalError",
    "LayoutError",
    "PdkvError",
    "PeerError",
    "PeerLostError",
    "PeerUnreachableError",
    "ReferenceDigestError",
    "ReferenceExpiredError",
    "ReferenceFingerprintError",
    "ReferenceForgedError",
    "ReferenceMismatchError",
    "ReferenceReleasedError",
    "ReferenceRestartedError",
    "ReferenceUnknownError",
    "ReferenceUsedError",
    "RegionError",
    "StaleReferenceError",
    "TransferCancelledError",
    "TransferError",
    "TransferTimeoutError",
    "UnsupportedError",
]


class PdkvError(Exception):
    """Base of everything pdkv raises.

    Attributes:
        kind: A short name of the cause, stable across releases, for example `"region"`.
        scope: The largest thing that died: `"operation"`, `"transfer"`, `"endpoint"` or `"engine"`.
        retryable: Whether the same call may succeed later.
        operation: The call that met the error.
        context: The values involved, by name.
        hint: What to do about it, or `None`.
    """

    kind: str = "internal"
    scope: str = "operation"
    retryable: bool = False

    def __init__(
        self,
        message: str = "",
        *,
        kind: str | None = None,
        scope: str | None = None,
        retryable: bool | None = None,
        operation: str = "",
        context: Mapping[str, str] | None = None,
        hint: str | None = None,
    ) -> None:
        """Makes an error.

        Args:
            message: The exact cause in one line.
            kind: Overrides the kind of the class.
            scope: Overrides the scope of the class.
            retryable: Overrides the retry advice of the class.
            operation: The call that met the error.
            context: The values involved, by name.
            hint: What to do about it.
        """
        super().__init__(message)
        self.message = message
        if kind is not None:
            self.kind = kind
        if scope is not None:
            self.scope = scope
        if retryable is not None:
            self.retryable = retryable
        self.operation = operation
        self.context = dict(context or {})
        self.hint = hint

    def __str__(self) -> str:
        """Gives the operation, the cause, and the hint on its own paragraph."""
        text = f"{self.operation}: {self.message}" if self.operation else self.message
        return f"{text}\n\nhint: {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles by message and attributes, whatever the builtin bases would do."""
        return (type(self), (self.message,), self.__dict__.copy())


class ConfigError(PdkvError, ValueError):
    """A bad or contradictory setting; names it and the accepted values."""

    kind = "config"


class LayoutError(PdkvError, ValueError):
    """Shapes, strides, dtypes or block ids that do not fit."""

    kind = "layout"


class UnsupportedError(PdkvError):
    """A capability that is missing here; the hint names how to get it."""

    kind = "unsupported"


class RegionError(PdkvError):
    """Memory that is not registered, overlapping, freed or somebody else's."""

    kind = "region"


class CapacityError(PdkvError):
    """A pool, queue or cap is exhausted; may pass."""

    kind = "capacity"
    retryable = True


class TransferError(PdkvError):
    """One transfer failed."""

    kind = "transfer"
    scope = "transfer"
    retryable = True


class TransferTimeoutError(TransferError, TimeoutError):
    """One transfer passed its deadline, or a wait for it did."""

    kind = "transfer_timeout"


class TransferCancelledError(TransferError):
    """One transfer was cancelled by its owner."""

    kind = "transfer_cancelled"
    retryable = False


class IntegrityError(TransferError):
    """Bytes arrived that are not the bytes that were sent; never retried silently."""

    kind = "integrity"
    retryable = False


class PeerError(PdkvError, ConnectionError):
    """The connection to a peer failed."""

    kind = "peer_lost"
    scope = "endpoint"
    retryable = True


class PeerUnreachableError(PeerError):
    """Nobody answers at the address."""

    kind = "peer_unreachable"


class PeerLostError(PeerError):
    """A connected peer went away or fell silent."""

    kind = "peer_lost"


class HandshakeError(PeerError):
    """The peer speaks another protocol or its layout means something else; lists every difference."""

    kind = "handshake"
    retryable = False


class StaleReferenceError(PdkvError):
    """The export behind a reference is no longer there: expired, released, used, or of an earlier life."""

    kind = "reference_unknown"
    scope = "transfer"


class ReferenceUnknownError(StaleReferenceError):
    """The owner knows no such export."""

    kind = "reference_unknown"


class ReferenceUsedError(StaleReferenceError):
    """All consumers the export was made for have had it."""

    kind = "reference_used"


class ReferenceReleasedError(StaleReferenceError):
    """The owner released the export."""

    kind = "reference_released"


class ReferenceExpiredError(StaleReferenceError):
    """The lease of the export ended."""

    kind = "reference_expired"


class ReferenceRestartedError(StaleReferenceError):
    """The reference was made by an earlier incarnation of the engine."""

    kind = "reference_restarted"


class ReferenceMismatchError(PdkvError):
    """The reference is not for these bytes: another prompt, another model, or altered."""

    kind = "reference_forged"
    scope = "transfer"


class ReferenceDigestError(ReferenceMismatchError):
    """The digest of the prefix is not the export's."""

    kind = "reference_digest"


class ReferenceFingerprintError(ReferenceMismatchError):
    """The model or layout fingerprint is not the export's."""

    kind = "reference_fingerprint"


class ReferenceForgedError(ReferenceMismatchError):
    """The reference is not one that the engine issued: a field was altered."""

    kind = "reference_forged"


class DeviceError(PdkvError):
    """A device call failed; carries the code and the call."""

    kind = "device"


class ClosedError(PdkvError):
    """Used after close."""

    kind = "closed"


class InternalError(PdkvError):
    """A bug in pdkv. Please report it with the message and `pdkv.build_info()`."""

    kind = "internal"
