//! References issued ahead of their exports: taking the issuer of a cache, minting in another process, and
//! making the export that a reference promises.

use std::time::Duration;

use pdkv_core::block_table::BlockTable;
use pdkv_core::export::ExportSpec;
use pdkv_core::id::ExportId;
use pdkv_core::issuer::Issuer;
use pdkv_core::reference::{ExportKind, Reference};
use pdkv_core::{Error, ErrorKind, Result};

use crate::cache::KvCache;
use crate::export::Export;

/// What the caller says about an export whose reference says it too. What is stated must agree.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stated<'a> {
    /// Tokens the blocks hold.
    pub num_tokens: Option<u64>,
    /// Digest of the prefix.
    pub digest: Option<&'a [u8]>,
    /// Consumers the export is for.
    pub consumers: Option<u32>,
}

impl KvCache {
    /// What mints references of this cache in another process of this instance. It holds the key that seals
    /// them: a secret. From now on, claims that come before their export wait up to 10 s for it, and
    /// [`Engine::take_ended`](crate::Engine::take_ended) collects.
    ///
    /// # Errors
    /// `Region` when the cache was deregistered, `Closed`.
    pub fn issuer(&self) -> Result<Issuer> {
        self.shared.check_open("issuer")?;
        self.shared.registry.cache(self.local.id)?;
        self.shared.ended.collect();
        let (cache, fingerprint) = (self.local.id, self.local.fingerprint);
        Ok(self.shared.drive(|state, _| state.node.issuer(cache, fingerprint)))
    }

    /// Makes the export that a reference of this cache's issuer promises. Consumers who came first are
    /// answered now.
    ///
    /// # Errors
    /// `ReferenceRestarted` and `ReferenceForged` for a reference that this engine's issuers didn't mint,
    /// `ReferenceUsed` when its export was made already; `Config`, `Layout`, `ReferenceDigest` or
    /// `ReferenceFingerprint` when what is exported is not what was promised; and those of
    /// [`export`](Self::export).
    pub fn export_issued(
        &self,
        blocks: BlockTable,
        reference: &Reference,
        stated: Stated<'_>,
        lease: Duration,
    ) -> Result<Export> {
        let spec = ExportSpec {
            id: reference.export_id,
            kind: ExportKind::Export,
            cache: self.local.id,
            blocks,
            num_layers: self.local.layout.num_layers(),
            num_tokens: stated.num_tokens.unwrap_or(reference.num_tokens),
            digest: stated.digest.unwrap_or(&reference.digest).to_vec(),
            fingerprint: self.local.fingerprint,
            consumers: stated.consumers.unwrap_or(reference.consumers),
            lease,
        };
        self.pin(spec, |node, now, spec| {
            node.export_issued(now, spec, reference)?;
            Ok(reference.clone())
        })
    }
}

/// Seals a reference with a fresh random id; see [`Issuer::issue`].
///
/// # Errors
/// Those of [`Issuer::issue`], and `Internal` when the system gives no random bytes.
pub fn issue(issuer: &Issuer, num_blocks: u32, num_tokens: u64, digest: &[u8], consumers: u32) -> Result<Reference> {
    issuer.issue(num_blocks, num_tokens, digest, consumers, random_id("issue")?)
}

pub(crate) fn random_id(operation: &'static str) -> Result<ExportId> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|error| {
        let text = format!("the system gives no random bytes: {error}");
        Error::new(ErrorKind::Internal, operation, text)
    })?;
    Ok(ExportId::new(random))
}
