//! Mints references ahead of their exports, in another process than the engine's.
//!
//! An issuer is what of an engine goes into a reference, and the key that seals it. It is handed over as
//! bytes, once, to a process of the same instance: whoever has them can seal references of this life of
//! the engine for this cache, so they are a secret. What is deliberately absent: blocks, leases, and
//! whether the export is ever made. Randomness is an argument.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::id::{CacheId, ExportId, Incarnation};
use crate::reference::{ExportKind, MAX_DIGEST, MAX_NAME, REFERENCE_VERSION, Reference};

const MAGIC: &[u8] = b"pdkv-issuer";
/// The format of the bytes that this release writes and reads.
const FORMAT: u8 = 1;
const OPERATION: &str = "read issuer";

/// What mints references of one cache of one life of an engine.
#[derive(Clone, PartialEq, Eq)]
pub struct Issuer {
    pub(crate) engine: String,
    pub(crate) address: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) cache: CacheId,
    pub(crate) fingerprint: [u8; 32],
    pub(crate) key: [u8; 32],
}

impl Issuer {
    /// Name of the engine.
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// Where the engine accepts connections; empty if it doesn't.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The engine's life.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The engine's cache.
    pub fn cache(&self) -> CacheId {
        self.cache
    }

    /// What the bytes of the cache mean.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// Seals the reference of an export that the engine is going to make. `id` is random: an id that comes a
    /// second time is refused when the export is made.
    ///
    /// # Errors
    /// `Config` for zero consumers or a long digest.
    pub fn issue(
        &self,
        num_blocks: u32,
        num_tokens: u64,
        digest: &[u8],
        consumers: u32,
        id: ExportId,
    ) -> Result<Reference> {
        check_wish(consumers, digest, "issue")?;
        let reference = Reference {
            version: REFERENCE_VERSION,
            kind: ExportKind::Export,
            engine: self.engine.clone(),
            address: self.address.clone(),
            incarnation: self.incarnation,
            export_id: id,
            cache: self.cache,
            digest: digest.to_vec(),
            fingerprint: self.fingerprint,
            num_tokens,
            num_blocks,
            consumers,
            tag: [0; 16],
        };
        Ok(reference.sealed(&self.key))
    }

    /// Writes the issuer, key included, for a process that may seal references of this engine.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.push(FORMAT);
        bytes.extend(self.incarnation.as_bytes());
        bytes.extend(self.cache.0.to_le_bytes());
        bytes.extend(self.fingerprint);
        bytes.extend(self.key);
        for text in [&self.engine, &self.address] {
            // Neither is longer than `MAX_NAME`, or no reference of the engine could be read.
            bytes.extend((text.len() as u16).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        bytes
    }

    /// Reads what [`to_bytes`](Self::to_bytes) writes, and not a byte more.
    ///
    /// # Errors
    /// `Config` for anything else, `Unsupported` for a later format. The bytes are not repeated in the error.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut rest = bytes;
        if take(&mut rest, MAGIC.len(), "mark")? != MAGIC {
            return Err(bad("they do not begin as an issuer does"));
        }
        let [format] = array(&mut rest, "format")?;
        if format == 0 || format > FORMAT {
            let text = format!("the issuer has format `{format}`, this release reads `{FORMAT}`");
            return Err(Error::new(ErrorKind::Unsupported, OPERATION, text)
                .with_hint("use the same pdkv release in all processes of an instance"));
        }
        let issuer = Self {
            incarnation: Incarnation::new(array(&mut rest, "incarnation")?),
            cache: CacheId(u64::from_le_bytes(array(&mut rest, "cache")?)),
            fingerprint: array(&mut rest, "fingerprint")?,
            key: array(&mut rest, "key")?,
            engine: text(&mut rest, "engine")?,
            address: text(&mut rest, "address")?,
        };
        if rest.is_empty() {
            Ok(issuer)
        } else {
            Err(bad(&format!("`{}` bytes are left over", rest.len())))
        }
    }
}

/// The key is shown to nobody.
impl fmt::Debug for Issuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Issuer({}, life {}, cache {})",
            self.engine, self.incarnation, self.cache
        )
    }
}

/// Checks what whoever makes or promises an export may choose.
pub(crate) fn check_wish(consumers: u32, digest: &[u8], operation: &'static str) -> Result<()> {
    let error = |text: String| Err(Error::new(ErrorKind::Config, operation, text));
    if consumers == 0 {
        return error("`consumers` is `0`, at least one is needed".to_owned());
    }
    if digest.len() > MAX_DIGEST {
        return error(format!(
            "`digest` has `{}` bytes, at most `{MAX_DIGEST}` are allowed",
            digest.len()
        ));
    }
    Ok(())
}

fn bad(cause: &str) -> Error {
    Error::new(
        ErrorKind::Config,
        OPERATION,
        format!("these bytes are no issuer: {cause}"),
    )
    .with_hint("pass the bytes of `Issuer.to_bytes()` unchanged")
}

fn take<'a>(rest: &mut &'a [u8], len: usize, field: &str) -> Result<&'a [u8]> {
    let Some((taken, after)) = rest.split_at_checked(len) else {
        return Err(bad(&format!(
            "`{field}` needs `{len}` bytes, `{}` are left",
            rest.len()
        )));
    };
    *rest = after;
    Ok(taken)
}

fn array<const N: usize>(rest: &mut &[u8], field: &str) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    bytes.copy_from_slice(take(rest, N, field)?);
    Ok(bytes)
}

fn text(rest: &mut &[u8], field: &str) -> Result<String> {
    let len = usize::from(u16::from_le_bytes(array(rest, field)?));
    if len > MAX_NAME {
        return Err(bad(&format!(
            "`{field}` would have `{len}` bytes, at most `{MAX_NAME}` are allowed"
        )));
    }
    let bytes = take(rest, len, field)?;
    String::from_utf8(bytes.to_vec()).map_err(|_| bad(&format!("`{field}` is no text")))
}
