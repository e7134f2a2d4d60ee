//! What bytes mean, in 32 bytes: fingerprints of caches and digests of prompts.
//!
//! Two caches with the same fingerprint hold the same part of the same model in the same types, so
//! their bytes may be exchanged. Where the bytes lie does not enter.

use crate::layout::KvLayout;
use crate::shard::Shard;

/// The fingerprint of a cache: model, meaning of the layout, and the part of the model it holds.
/// Ranks don't enter, so that replicated heads count as equal.
pub fn fingerprint(model: &str, layout: &KvLayout, shard: &Shard) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("pdkv 2026 cache fingerprint v1");
    for part in [
        model.as_bytes(),
        &layout.fingerprint_input(),
        &shard.fingerprint_input(),
    ] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

/// A digest of parts of any bytes, for telling whether something is what it was: `["ab", "c"]` is not `["a", "bc"]`.
pub fn parts_digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("pdkv 2026 parts digest v1");
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

/// A digest of prompt tokens for callers that have none of their own. `salt` separates what equal
/// tokens don't: an adapter, a tenant, a multimodal input.
pub fn token_digest(tokens: &[u32], salt: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("pdkv 2026 token digest v1");
    hasher.update(&(salt.len() as u64).to_le_bytes());
    hasher.update(salt);
    let mut buffer = [0u8; 4096];
    for chunk in tokens.chunks(buffer.len() / 4) {
        for (bytes, token) in buffer.chunks_exact_mut(4).zip(chunk) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        hasher.update(&buffer[..chunk.len() * 4]);
    }
    *hasher.finalize().as_bytes()
}
