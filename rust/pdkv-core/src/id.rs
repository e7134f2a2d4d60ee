//! Identities as newtypes, so that no signature ever takes three bare integers in a row.
//!
//! Ids that cross the wire are either random (`ExportId`, `Incarnation`: nobody can guess or reuse
//! them) or counters that are never reused within one incarnation (`RegionId`, `CacheId`,
//! `TransferId`). Randomness is an argument: this crate draws none.

use std::fmt;

macro_rules! random_id {
    ($(#[doc = $doc:literal])+ $name:ident) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name([u8; 16]);

        impl $name {
            /// Wraps 16 random bytes.
            pub const fn new(bytes: [u8; 16]) -> Self {
                Self(bytes)
            }

            /// Reads the id from wire bytes; `None` unless there are exactly 16.
            pub fn from_slice(bytes: &[u8]) -> Option<Self> {
                bytes.try_into().ok().map(Self)
            }

            /// The raw bytes.
            pub const fn as_bytes(&self) -> &[u8; 16] {
                &self.0
            }

            /// Reads 32 hexadecimal digits.
            pub fn from_hex(text: &str) -> Option<Self> {
                crate::hex::decode(text)?.try_into().ok().map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&crate::hex::encode(&self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    };
}

macro_rules! counter_id {
    ($(#[doc = $doc:literal])+ $name:ident) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

random_id! {
    /// Names one export (or offer) of one engine; random, so it can't be guessed or come up again.
    ExportId
}
random_id! {
    /// One life of an engine: drawn at start, so a restarted engine on the same port is another one.
    Incarnation
}
random_id! {
    /// Lets a data stream or a local socket join the session whose control channel told it.
    SessionToken
}
counter_id! {
    /// Registered memory of one engine; never reused while the engine lives.
    RegionId
}
counter_id! {
    /// A registered KV cache of one engine; never reused while the engine lives.
    CacheId
}
counter_id! {
    /// One transfer, counted by the engine that started it.
    TransferId
}
counter_id! {
    /// One control channel, counted by the engine that holds it; local, never on the wire.
    PeerKey
}
