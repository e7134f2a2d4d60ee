//! The capability a consumer needs to claim an export: what travels in `kv_transfer_params`.
//!
//! A reference names one export of one life of one engine and says what its bytes mean. A keyed tag
//! over every field makes each alteration visible to the owner, the only one who can check it. The
//! other refusals (used, released, expired, ...) are the owner's and live in `node`.

use serde_json::{Map, Value};

use crate::error::{Error, ErrorKind, Result};
use crate::hex;
use crate::id::{CacheId, ExportId, Incarnation};

/// The format this release writes.
pub const REFERENCE_VERSION: u32 = 1;
/// Longest digest a caller may give.
pub const MAX_DIGEST: usize = 64;
/// Longest engine name and address.
pub const MAX_NAME: usize = 256;
/// Longest JSON text that is looked at.
pub const MAX_REFERENCE_JSON: usize = 8192;

const OPERATION: &str = "read reference";

/// Which way the bytes of an export go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExportKind {
    /// The peer reads the pinned blocks.
    Export,
    /// The peer writes into the pinned blocks.
    Offer,
}

impl ExportKind {
    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Export => "export",
            Self::Offer => "offer",
        }
    }

    /// The code on the wire.
    pub fn code(self) -> u32 {
        match self {
            Self::Export => 1,
            Self::Offer => 2,
        }
    }

    /// Reads [`code`](Self::code).
    pub fn from_code(code: u32) -> Option<Self> {
        match code {
            1 => Some(Self::Export),
            2 => Some(Self::Offer),
            _ => None,
        }
    }
}

/// What a consumer needs to claim an export. Plain data; only the owner can tell a true one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    /// Format version.
    pub version: u32,
    /// Whether the peer reads or writes.
    pub kind: ExportKind,
    /// Name of the owning engine.
    pub engine: String,
    /// Where the owner accepts connections; empty if it doesn't.
    pub address: String,
    /// The owner's life.
    pub incarnation: Incarnation,
    /// Random name of the export.
    pub export_id: ExportId,
    /// The owner's cache.
    pub cache: CacheId,
    /// The caller's digest of the prefix tokens, at most [`MAX_DIGEST`] bytes.
    pub digest: Vec<u8>,
    /// What the bytes mean: model, layout, shard.
    pub fingerprint: [u8; 32],
    /// Tokens held.
    pub num_tokens: u64,
    /// Blocks pinned.
    pub num_blocks: u32,
    /// Consumers the export is for.
    pub consumers: u32,
    /// Keyed tag over all the fields above.
    pub tag: [u8; 16],
}

impl Reference {
    /// The tag that the owner of `key` would put on these fields.
    pub fn expected_tag(&self, key: &[u8; 32]) -> [u8; 16] {
        let mut hasher = blake3::Hasher::new_keyed(key);
        let mut field = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        field(b"pdkv-reference");
        field(&self.version.to_le_bytes());
        field(&self.kind.code().to_le_bytes());
        field(self.engine.as_bytes());
        field(self.address.as_bytes());
        field(self.incarnation.as_bytes());
        field(self.export_id.as_bytes());
        field(&self.cache.0.to_le_bytes());
        field(&self.digest);
        field(&self.fingerprint);
        field(&self.num_tokens.to_le_bytes());
        field(&self.num_blocks.to_le_bytes());
        field(&self.consumers.to_le_bytes());
        let mut tag = [0; 16];
        tag.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        tag
    }

    /// Puts the owner's tag on the reference.
    #[must_use]
    pub fn sealed(mut self, key: &[u8; 32]) -> Self {
        self.tag = self.expected_tag(key);
        self
    }

    /// Whether the tag is the owner's, compared in constant time.
    pub fn is_genuine(&self, key: &[u8; 32]) -> bool {
        let expected = self.expected_tag(key);
        let difference = expected.iter().zip(&self.tag).fold(0u8, |sum, (a, b)| sum | (a ^ b));
        difference == 0
    }

    /// Checks the caps that hold for every reference, wherever it came from.
    ///
    /// # Errors
    /// `Unsupported` for a later format, `ReferenceForged` for a field that no owner would write.
    pub fn check(&self) -> Result<()> {
        if self.version == 0 || self.version > REFERENCE_VERSION {
            let text = format!(
                "reference has format `{}`, this release reads `1` to `{REFERENCE_VERSION}`",
                self.version
            );
            return Err(Error::new(ErrorKind::Unsupported, OPERATION, text)
                .with_hint("use the same pdkv release on both sides"));
        }
        let caps = [
            ("engine", self.engine.len(), MAX_NAME),
            ("address", self.address.len(), MAX_NAME),
            ("digest", self.digest.len(), MAX_DIGEST),
        ];
        for (name, len, cap) in caps {
            if len > cap {
                return Err(forged(
                    name,
                    &format!("holds `{len}` bytes, at most `{cap}` are allowed"),
                ));
            }
        }
        if self.consumers == 0 {
            return Err(forged("consumers", "is `0`"));
        }
        Ok(())
    }

    /// Writes the JSON object that travels in request parameters. The keys are stable.
    pub fn to_json(&self) -> String {
        let mut map = Map::new();
        let mut put = |key: &str, value: Value| {
            map.insert(key.to_owned(), value);
        };
        put("version", self.version.into());
        put("kind", self.kind.as_str().into());
        put("engine", self.engine.as_str().into());
        put("address", self.address.as_str().into());
        put("incarnation", self.incarnation.to_string().into());
        put("export_id", self.export_id.to_string().into());
        put("cache", self.cache.0.into());
        put("digest", hex::encode(&self.digest).into());
        put("fingerprint", hex::encode(&self.fingerprint).into());
        put("num_tokens", self.num_tokens.into());
        put("num_blocks", self.num_blocks.into());
        put("consumers", self.consumers.into());
        put("tag", hex::encode(&self.tag).into());
        Value::Object(map).to_string()
    }

    /// Reads what [`to_json`](Self::to_json) writes; unknown keys are ignored.
    ///
    /// # Errors
    /// `Config` when the text is no JSON object or lacks a field, `ReferenceForged` when a field
    /// holds what no owner would write, `Unsupported` for a later format.
    pub fn from_json(text: &str) -> Result<Self> {
        if text.len() > MAX_REFERENCE_JSON {
            let cause = format!(
                "reference text has `{}` bytes, at most `{MAX_REFERENCE_JSON}` are read",
                text.len()
            );
            return Err(Error::new(ErrorKind::Config, OPERATION, cause));
        }
        let value: Value = serde_json::from_str(text)
            .map_err(|e| Error::new(ErrorKind::Config, OPERATION, "reference text is not JSON").with_source(e))?;
        let Value::Object(map) = value else {
            return Err(Error::new(
                ErrorKind::Config,
                OPERATION,
                "reference text is not a JSON object",
            ));
        };
        let fields = Fields(&map);
        let reference = Self {
            version: fields.number("version")?,
            kind: match fields.text("kind")? {
                "export" => ExportKind::Export,
                "offer" => ExportKind::Offer,
                other => {
                    return Err(forged(
                        "kind",
                        &format!("is `{}`, not `export` or `offer`", shorten(other)),
                    ));
                }
            },
            engine: fields.text("engine")?.to_owned(),
            address: fields.text("address")?.to_owned(),
            incarnation: Incarnation::new(fields.bytes("incarnation")?),
            export_id: ExportId::new(fields.bytes("export_id")?),
            cache: CacheId(fields.number("cache")?),
            digest: fields.hex("digest")?,
            fingerprint: fields.bytes("fingerprint")?,
            num_tokens: fields.number("num_tokens")?,
            num_blocks: fields.number("num_blocks")?,
            consumers: fields.number("consumers")?,
            tag: fields.bytes("tag")?,
        };
        reference.check()?;
        Ok(reference)
    }
}

struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, name: &'static str) -> Result<&Value> {
        self.0.get(name).ok_or_else(|| {
            Error::new(ErrorKind::Config, OPERATION, format!("reference has no field `{name}`"))
                .with_hint("pass the text of `Reference.to_json()` unchanged")
        })
    }

    fn text(&self, name: &'static str) -> Result<&str> {
        self.get(name)?.as_str().ok_or_else(|| forged(name, "is not a string"))
    }

    fn number<T: TryFrom<u64>>(&self, name: &'static str) -> Result<T> {
        let number = self.get(name)?.as_u64().and_then(|n| T::try_from(n).ok());
        number.ok_or_else(|| forged(name, "is not a number in range"))
    }

    fn hex(&self, name: &'static str) -> Result<Vec<u8>> {
        hex::decode(self.text(name)?).ok_or_else(|| forged(name, "is not lowercase hexadecimal"))
    }

    fn bytes<const N: usize>(&self, name: &'static str) -> Result<[u8; N]> {
        let bytes = self.hex(name)?;
        let len = bytes.len();
        bytes
            .try_into()
            .map_err(|_| forged(name, &format!("holds `{len}` bytes, not `{N}`")))
    }
}

fn forged(field: &str, cause: &str) -> Error {
    Error::new(
        ErrorKind::ReferenceForged,
        OPERATION,
        format!("reference field `{field}` {cause}"),
    )
}

fn shorten(text: &str) -> String {
    text.chars().take(32).collect()
}
