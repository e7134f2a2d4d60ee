//! The one error type of pdkv: what failed, what died with it, and whether trying again can help.
//!
//! Every crate converts into [`Error`]. The catalogue below is the single table from which the Rust
//! enum, the slugs, the wire codes and the Python classes come; `tests/repo` compares it with
//! `python/pdkv/errors.py` and `docs/reference/errors.md`. This module knows no Python and no I/O.

use std::fmt;
use std::sync::Arc;

/// The result of every fallible pdkv call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The largest thing an error kills, so the caller knows what to rebuild.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Only this call failed.
    Operation,
    /// One transfer ended.
    Transfer,
    /// The connection to one peer is gone.
    Endpoint,
    /// The whole engine is unusable.
    Engine,
}

impl Scope {
    /// The lowercase name shown to users.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Operation => "operation",
            Self::Transfer => "transfer",
            Self::Endpoint => "endpoint",
            Self::Engine => "engine",
        }
    }
}

/// Whether trying the same thing again can succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Retry {
    /// It can't.
    Never,
    /// It may, once the condition named in the message has passed.
    Later,
    /// It was tried as often as allowed.
    Exhausted,
}

macro_rules! error_kinds {
    ($( $(#[doc = $doc:literal])+ $kind:ident = $code:literal, $slug:literal, $class:literal, $scope:ident, $retry:ident; )+) => {
        /// What went wrong. The discriminant is the code on the wire and never changes meaning.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        #[repr(u16)]
        pub enum ErrorKind { $( $(#[doc = $doc])+ $kind = $code, )+ }

        impl ErrorKind {
            /// Every kind, in table order.
            pub const ALL: &'static [Self] = &[ $( Self::$kind, )+ ];

            /// A short snake_case name, stable across releases.
            pub fn slug(self) -> &'static str { match self { $( Self::$kind => $slug, )+ } }

            /// The Python class in `pdkv.errors` that carries this kind.
            pub fn python_class(self) -> &'static str { match self { $( Self::$kind => $class, )+ } }

            /// The scope an error of this kind has unless it says otherwise.
            pub fn scope(self) -> Scope { match self { $( Self::$kind => Scope::$scope, )+ } }

            /// The retry advice an error of this kind has unless it says otherwise.
            pub fn retry(self) -> Retry { match self { $( Self::$kind => Retry::$retry, )+ } }

            /// The kind for a code read from the wire; unknown codes are `Internal` of the peer.
            pub fn from_code(code: u32) -> Self { match code { $( $code => Self::$kind, )+ _ => Self::Internal } }
        }
    };
}

error_kinds! {
    /// A bad or contradictory setting.
    Config = 1, "config", "ConfigError", Operation, Never;
    /// Shapes, strides, dtypes or block ids that do not fit.
    Layout = 2, "layout", "LayoutError", Operation, Never;
    /// A capability that is missing here.
    Unsupported = 3, "unsupported", "UnsupportedError", Operation, Never;
    /// A region that is unknown, freed, overlapping or owned by somebody else.
    Region = 4, "region", "RegionError", Operation, Never;
    /// A pool, queue or cap is exhausted.
    Capacity = 5, "capacity", "CapacityError", Operation, Later;
    /// One transfer failed.
    Transfer = 6, "transfer", "TransferError", Transfer, Later;
    /// One transfer passed its deadline.
    TransferTimeout = 7, "transfer_timeout", "TransferTimeoutError", Transfer, Later;
    /// One transfer was cancelled by its owner.
    TransferCancelled = 8, "transfer_cancelled", "TransferCancelledError", Transfer, Never;
    /// Bytes arrived that are not the bytes that were sent.
    Integrity = 9, "integrity", "IntegrityError", Transfer, Never;
    /// Nobody answers at the address.
    PeerUnreachable = 10, "peer_unreachable", "PeerUnreachableError", Endpoint, Later;
    /// A connected peer went away or fell silent.
    PeerLost = 11, "peer_lost", "PeerLostError", Endpoint, Later;
    /// The peer speaks another protocol, or its layout means something else.
    Handshake = 12, "handshake", "HandshakeError", Endpoint, Never;
    /// The owner knows no such export.
    ReferenceUnknown = 13, "reference_unknown", "ReferenceUnknownError", Transfer, Never;
    /// All consumers the export was made for have had it.
    ReferenceUsed = 14, "reference_used", "ReferenceUsedError", Transfer, Never;
    /// The owner released the export.
    ReferenceReleased = 15, "reference_released", "ReferenceReleasedError", Transfer, Never;
    /// The lease of the export ended.
    ReferenceExpired = 16, "reference_expired", "ReferenceExpiredError", Transfer, Never;
    /// The reference was made by an earlier incarnation of the engine.
    ReferenceRestarted = 17, "reference_restarted", "ReferenceRestartedError", Transfer, Never;
    /// The digest of the prefix is not the export's.
    ReferenceDigest = 18, "reference_digest", "ReferenceDigestError", Transfer, Never;
    /// The model or layout fingerprint is not the export's.
    ReferenceFingerprint = 19, "reference_fingerprint", "ReferenceFingerprintError", Transfer, Never;
    /// The reference is not one that the engine issued: a field was altered.
    ReferenceForged = 20, "reference_forged", "ReferenceForgedError", Transfer, Never;
    /// A device call failed.
    Device = 21, "device", "DeviceError", Operation, Never;
    /// Used after close.
    Closed = 22, "closed", "ClosedError", Operation, Never;
    /// A bug of ours.
    Internal = 23, "internal", "InternalError", Operation, Never;
}

/// One failure: kind, scope, retry advice, operation, message, hint and context pairs.
///
/// `Display` gives one line, `Debug` gives everything. Cloning is cheap.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    scope: Scope,
    retry: Retry,
    operation: &'static str,
    message: String,
    hint: Option<String>,
    context: Vec<(&'static str, String)>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// Makes an error of `kind` met while doing `operation`. The message is lowercase, names the
    /// exact cause and puts values in backticks.
    #[must_use]
    pub fn new(kind: ErrorKind, operation: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            scope: kind.scope(),
            retry: kind.retry(),
            operation,
            message: message.into(),
            hint: None,
            context: Vec::new(),
            source: None,
        }))
    }

    /// Adds what the user can do about it.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Adds one context pair, for example `("peer", "decode-1")`.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl fmt::Display) -> Self {
        self.0.context.push((key, value.to_string()));
        self
    }

    /// Overrides the retry advice of the kind.
    #[must_use]
    pub fn with_retry(mut self, retry: Retry) -> Self {
        self.0.retry = retry;
        self
    }

    /// Overrides the scope of the kind.
    #[must_use]
    pub fn with_scope(mut self, scope: Scope) -> Self {
        self.0.scope = scope;
        self
    }

    /// Attaches the error of the layer below.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What died with it.
    pub fn scope(&self) -> Scope {
        self.0.scope
    }

    /// Whether trying again can help.
    pub fn retry(&self) -> Retry {
        self.0.retry
    }

    /// The operation that met it.
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// The one-line cause, without hint.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// The context pairs, in the order they were added.
    pub fn context(&self) -> &[(&'static str, String)] {
        &self.0.context
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.operation, self.0.message)?;
        if let Some(source) = &self.0.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self, self.0.kind.slug())?;
        write!(f, "\n  scope: {}, retry: {:?}", self.0.scope.as_str(), self.0.retry)?;
        for (key, value) in &self.0.context {
            write!(f, "\n  {key}: {value}")?;
        }
        if let Some(hint) = &self.0.hint {
            write!(f, "\n  hint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0
            .source
            .as_ref()
            .map(|s| s.as_ref() as &(dyn std::error::Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_comes_back_as_its_kind() {
        for &kind in ErrorKind::ALL {
            assert_eq!(ErrorKind::from_code(kind as u32), kind);
        }
        assert_eq!(ErrorKind::from_code(60_000), ErrorKind::Internal);
    }

    #[test]
    fn display_is_one_line_and_debug_carries_the_rest() {
        let error = Error::new(
            ErrorKind::Region,
            "claim",
            "region `kv.layer3` holds blocks 0..1023, asked for `1024`",
        )
        .with_hint("both sides must start with the same `num_blocks`")
        .with("peer", "decode-0");
        assert!(!error.to_string().contains('\n'));
        let long = format!("{error:?}");
        assert!(long.contains("hint: both sides") && long.contains("peer: decode-0"));
    }
}
