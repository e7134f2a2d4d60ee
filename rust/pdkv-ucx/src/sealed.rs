//! The wrapping of what UCX parses without being told a length: worker addresses and packed keys.
//!
//! UCX walks such bytes by the lengths it finds in them. Whatever is cut short, mixed up or random is
//! found out here, by kind, length and checksum, before UCX sees it. That isn't a defence against a peer
//! who computes the checksum of a lie. Tried with such lies, UCX 1.13 and 1.22 bear cut addresses and keys (the
//! padding of zeros ends the walk) and random addresses (most by their form, see `Endpoint::connect`), but die of
//! one key in fifteen with a wrong byte, and 1.13 of most random keys. So connections are for peers that are trusted
//! not to lie: those that know the secret.

use pdkv_core::{Error, ErrorKind, Result};

use crate::library::Version;

/// The longest wrapped address or key that is read or written.
pub const SEALED_MAX_BYTES: usize = 64 * 1024;

const MAGIC: [u8; 3] = *b"pux";
/// Magic, kind, version (3 × u16), length u32, checksum u64.
const HEAD: usize = 4 + 6 + 4 + 8;

/// What is wrapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Address = 1,
    Key = 2,
}

impl Kind {
    fn noun(self) -> &'static str {
        match self {
            Self::Address => "worker address",
            Self::Key => "memory key",
        }
    }
}

/// Wraps bytes that UCX made.
pub(crate) fn seal(kind: Kind, version: Version, raw: &[u8]) -> Result<Vec<u8>> {
    if raw.len() + HEAD > SEALED_MAX_BYTES {
        return Err(Error::new(
            ErrorKind::Capacity,
            "wrap",
            format!("a {} of `{}` bytes is longer than allowed", kind.noun(), raw.len()),
        ));
    }
    let mut sealed = Vec::with_capacity(HEAD + raw.len());
    sealed.extend(MAGIC);
    sealed.push(kind as u8);
    for part in [version.major, version.minor, version.release] {
        sealed.extend((part.min(u32::from(u16::MAX)) as u16).to_le_bytes());
    }
    sealed.extend((raw.len() as u32).to_le_bytes());
    sealed.extend(checksum(raw).to_le_bytes());
    sealed.extend(raw);
    Ok(sealed)
}

/// Bytes for UCX to parse, followed by padding.
#[derive(Debug)]
pub(crate) struct Opened {
    padded: Vec<u8>,
    /// The peer's release of UCX.
    pub(crate) version: Version,
}

impl Opened {
    pub(crate) fn first(&self) -> u8 {
        self.padded[0]
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.padded.as_ptr()
    }
}

/// Unwraps what a peer sent.
///
/// # Errors
/// `Handshake` for bytes that are no such thing, or not whole.
pub(crate) fn open(kind: Kind, sealed: &[u8]) -> Result<Opened> {
    let bad = |what: &str| {
        Error::new(
            ErrorKind::Handshake,
            "unwrap",
            format!("the peer's {} {what}", kind.noun()),
        )
        .with("bytes", sealed.len())
    };
    if sealed.len() > SEALED_MAX_BYTES {
        return Err(bad("is longer than allowed"));
    }
    let Some((head, raw)) = sealed.split_at_checked(HEAD) else {
        return Err(bad("is cut short"));
    };
    if head[..3] != MAGIC || head[3] != kind as u8 {
        return Err(bad("is something else"));
    }
    let u16_at = |at: usize| u32::from(u16::from_le_bytes([head[at], head[at + 1]]));
    let version = Version::new(u16_at(4), u16_at(6), u16_at(8));
    let len = u32::from_le_bytes([head[10], head[11], head[12], head[13]]) as usize;
    let mut sum = [0; 8];
    sum.copy_from_slice(&head[14..HEAD]);
    if raw.is_empty() || raw.len() != len {
        return Err(bad("has another length than it says"));
    }
    if checksum(raw) != u64::from_le_bytes(sum) {
        return Err(bad("has a wrong checksum"));
    }
    let mut padded = vec![0; SEALED_MAX_BYTES + raw.len()];
    padded[..raw.len()].copy_from_slice(raw);
    Ok(Opened { padded, version })
}

/// FNV-1a: against accidents, not against intent.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: Version = Version::new(1, 22, 0);

    #[test]
    fn what_is_wrapped_comes_back_padded() {
        let sealed = seal(Kind::Key, VERSION, b"key").unwrap();
        let opened = open(Kind::Key, &sealed).unwrap();
        assert_eq!(&opened.padded[..3], b"key");
        assert!(opened.padded.len() > SEALED_MAX_BYTES && opened.padded[3..].iter().all(|byte| *byte == 0));
        assert_eq!(opened.version, VERSION);
    }

    #[test]
    fn nothing_else_is_taken() {
        let sealed = seal(Kind::Address, VERSION, &[7; 100]).unwrap();
        assert_eq!(open(Kind::Key, &sealed).unwrap_err().kind(), ErrorKind::Handshake);
        for len in 0..sealed.len() {
            assert!(open(Kind::Address, &sealed[..len]).is_err(), "{len}");
        }
        for at in 0..sealed.len() {
            let mut wrong = sealed.clone();
            wrong[at] ^= 0x10;
            // The release is for reading only; every other bit counts.
            assert_eq!(open(Kind::Address, &wrong).is_err(), !(4..10).contains(&at), "{at}");
        }
        assert!(open(Kind::Address, &vec![0; SEALED_MAX_BYTES + 1]).is_err());
        assert!(seal(Kind::Address, VERSION, &vec![0; SEALED_MAX_BYTES]).is_err());
    }
}
