//! References issued ahead of their exports, and the consumers who are faster than the export.
//!
//! Once an issuer was taken from a cache, a genuine reference to an export that was never heard of is a
//! promise. A claim under it is parked and judged when the export is made, or refused as unknown when its
//! patience is over; a decline under it is remembered. Parked claims and declines hold the promise's
//! slots, so that a promise takes no more of them than its export would. What isn't sealed by this
//! life's key is never kept.

use core::fmt::Display;
use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use super::{Node, Now, Timer};
use crate::error::{Error, ErrorKind, Result, Scope};
use crate::export::{ExportSpec, ExportState};
use crate::hex;
use crate::id::{CacheId, ExportId, Incarnation, PeerKey, TransferId};
use crate::issuer::Issuer;
use crate::reference::{ExportKind, Reference};
use crate::wire::Claim;

/// What came before the exports it is for.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// Caches of which an issuer was taken.
    issuing: BTreeSet<CacheId>,
    parked: BTreeMap<(PeerKey, TransferId), Parked>,
    promises: BTreeMap<ExportId, Promise>,
    /// Declines in all promises.
    declines: usize,
}

#[derive(Debug)]
struct Parked {
    claim: Claim,
    arrived: Now,
    patience: Duration,
}

/// An export that peers have asked for and that isn't made yet.
#[derive(Debug, Default)]
struct Promise {
    /// Parked claims, in the order in which they came.
    waiting: Vec<(PeerKey, TransferId)>,
    declined: BTreeSet<(Incarnation, u64)>,
}

impl Promise {
    fn slots_taken(&self) -> u64 {
        (self.waiting.len() + self.declined.len()) as u64
    }
}

impl Node {
    /// What mints references of a cache in another process. From now on claims that come before their
    /// export wait for it a while.
    pub fn issuer(&mut self, cache: CacheId, fingerprint: [u8; 32]) -> Issuer {
        self.ahead.issuing.insert(cache);
        Issuer {
            engine: self.identity.name.clone(),
            address: self.identity.address.clone(),
            incarnation: self.identity.incarnation,
            cache,
            fingerprint,
            key: self.identity.mac_key,
        }
    }

    /// Claims that wait for their export to be made.
    pub fn parked_claims(&self) -> usize {
        self.ahead.parked.len()
    }

    /// Makes the export that a reference from an [`issuer`](Self::issuer) of ours promises. Whoever claimed or
    /// declined it already is answered now.
    ///
    /// # Errors
    /// `ReferenceRestarted` and `ReferenceForged` for a reference that this life of the engine didn't issue;
    /// `ReferenceUsed` when it was made already; `ReferenceFingerprint`, `ReferenceDigest`, `Layout` (number of
    /// blocks) or `Config` when `spec` is not what was promised, with both values; and those of
    /// [`export`](Self::export). Nothing is made then, and who waits goes on waiting.
    pub fn export_issued(&mut self, now: Now, spec: ExportSpec, reference: &Reference) -> Result<()> {
        self.check_origin(reference, "export")
            .and_then(|()| check_promised(&spec, reference))
            .and_then(|()| match self.export_state(reference.export_id) {
                ExportState::Unknown => Ok(()),
                state => {
                    let text = format!(
                        "export `{}` was made already and is `{}`",
                        reference.export_id,
                        state.as_str()
                    );
                    Err(Error::new(ErrorKind::ReferenceUsed, "export", text)
                        .with_hint("issue a reference for each export"))
                }
            })
            .map_err(|error| error.with_scope(Scope::Operation))?;
        self.export(now, spec)?;
        self.keep_promise(now, reference.export_id);
        Ok(())
    }

    /// Whether a reference is ours and its export may still be made.
    pub(super) fn is_ahead(&self, reference: &Reference) -> bool {
        reference.kind == ExportKind::Export
            && self.ahead.issuing.contains(&reference.cache)
            && self.export_state(reference.export_id) == ExportState::Unknown
            && self.check_origin(reference, "claim").is_ok()
    }

    /// Keeps a claim until its export is made. What can't be granted whatever is exported is refused now.
    pub(super) fn park(&mut self, now: Now, peer: PeerKey, claim: Claim) -> Result<()> {
        let (transfer, export) = (claim.transfer, claim.reference.export_id);
        super::claims::check_wanted(&claim, &claim.reference.digest, &claim.reference.fingerprint)?;
        let end = u64::from(claim.first_block) + u64::from(claim.num_blocks);
        if end > u64::from(claim.reference.num_blocks) {
            let text = format!(
                "blocks `{}..{end}` were claimed, the export will have `{}`",
                claim.first_block, claim.reference.num_blocks
            );
            return Err(
                Error::new(ErrorKind::Layout, "claim", text).with_hint("both sides must start with the same layout")
            );
        }
        if claim.remaining.is_zero() {
            return Err(super::claims::no_time());
        }
        let consumers = claim.reference.consumers;
        let taken = self.ahead.promises.get(&export).map_or(0, Promise::slots_taken);
        if taken >= u64::from(consumers) {
            let text = format!("the export will be for `{consumers}` consumers and all slots are taken");
            return Err(
                Error::new(ErrorKind::ReferenceUsed, "claim", text).with_hint("export with a larger `consumers`")
            );
        }
        let full = |limit: usize, whose: &str| {
            let text = format!("`{limit}` claims {whose} wait for exports that are not made yet");
            Err(Error::new(ErrorKind::Capacity, "claim", text).with_hint("wait for some to end"))
        };
        let Some(record) = self.peers.get_mut(&peer) else {
            return Ok(());
        };
        if record.parked >= self.config.max_early_claims_per_peer {
            return full(self.config.max_early_claims_per_peer, "of this peer");
        }
        if self.ahead.parked.len() >= self.config.max_early_claims {
            return full(self.config.max_early_claims, "of all peers");
        }
        record.parked += 1;
        self.stats.claims_parked += 1;
        let patience = claim.remaining.min(self.config.early_claim).min(self.config.max_claim);
        let key = (peer, transfer);
        self.timers
            .arm(Timer::Parked(peer, transfer), now.saturating_add(patience));
        let parked = Parked {
            claim,
            arrived: now,
            patience,
        };
        self.ahead.parked.insert(key, parked);
        self.ahead.promises.entry(export).or_default().waiting.push(key);
        Ok(())
    }

    /// Takes a claim out of the parking place; `None` when it isn't there.
    fn unpark(&mut self, key: (PeerKey, TransferId)) -> Option<Parked> {
        let parked = self.ahead.parked.remove(&key)?;
        self.timers.disarm(Timer::Parked(key.0, key.1));
        if let Some(record) = self.peers.get_mut(&key.0) {
            record.parked = record.parked.saturating_sub(1);
        }
        let export = parked.claim.reference.export_id;
        if let Some(promise) = self.ahead.promises.get_mut(&export) {
            promise.waiting.retain(|other| *other != key);
            if promise.slots_taken() == 0 {
                self.ahead.promises.remove(&export);
            }
        }
        Some(parked)
    }

    /// The initiator gives a parked claim back; `false` when it isn't parked.
    pub(super) fn abandon_parked(&mut self, key: (PeerKey, TransferId)) -> bool {
        self.unpark(key).is_some()
    }

    pub(super) fn is_parked(&self, key: (PeerKey, TransferId)) -> bool {
        self.ahead.parked.contains_key(&key)
    }

    /// Remembers that a consumer won't come; `false` when that changes nothing or there is no room.
    pub(super) fn decline_ahead(&mut self, now: Now, reference: &Reference, who: (Incarnation, u64)) -> bool {
        let export = reference.export_id;
        let taken = self.ahead.promises.get(&export).map_or(0, Promise::slots_taken);
        if taken >= u64::from(reference.consumers) || self.ahead.declines >= self.config.max_early_claims {
            return false;
        }
        let promise = self.ahead.promises.entry(export).or_default();
        if !promise.declined.insert(who) {
            return false;
        }
        self.ahead.declines += 1;
        if promise.declined.len() == 1 {
            // As long as the export would have waited for a consumer.
            let until = now.saturating_add(self.config.lease);
            self.timers.arm(Timer::Declined(export), until);
        }
        true
    }

    pub(super) fn declines_over(&mut self, export: ExportId) {
        let Some(promise) = self.ahead.promises.get_mut(&export) else {
            return;
        };
        self.ahead.declines -= promise.declined.len();
        promise.declined.clear();
        if promise.waiting.is_empty() {
            self.ahead.promises.remove(&export);
        }
    }

    pub(super) fn park_over(&mut self, peer: PeerKey, transfer: TransferId) {
        let Some(parked) = self.unpark((peer, transfer)) else {
            return;
        };
        let text = format!(
            "the owner knows no such export, and none was made within `{:?}`",
            parked.patience
        );
        self.refuse(peer, transfer, &unmade(text));
    }

    pub(super) fn parked_lost(&mut self, peer: PeerKey) {
        let all = (peer, TransferId(0))..=(peer, TransferId(u64::MAX));
        let keys: Vec<_> = self.ahead.parked.range(all).map(|(&key, _)| key).collect();
        for key in keys {
            self.unpark(key);
        }
    }

    /// No export of this cache, or of any, will be made any more: nothing waits for one.
    pub(super) fn break_promises(&mut self, cache: Option<CacheId>) {
        self.ahead
            .issuing
            .retain(|issuing| cache.is_some_and(|cache| cache != *issuing));
        let parked = self.ahead.parked.iter();
        let lost: Vec<_> = parked
            .filter(|(_, parked)| !self.ahead.issuing.contains(&parked.claim.reference.cache))
            .map(|(&key, _)| key)
            .collect();
        for key in lost {
            self.unpark(key);
            let text = "the owner knows no such export, and its cache is gone".to_owned();
            self.refuse(key.0, key.1, &unmade(text));
        }
    }

    /// The export is made: declines count, and claims are judged in the order in which they came.
    fn keep_promise(&mut self, now: Now, export: ExportId) {
        let Some(promise) = self.ahead.promises.remove(&export) else {
            return;
        };
        self.timers.disarm(Timer::Declined(export));
        self.ahead.declines -= promise.declined.len();
        for who in promise.declined {
            let record = self.exports.get_mut(&export);
            self.stats.rejects += u64::from(record.is_some_and(|record| record.reject(who)));
        }
        self.settle(export);
        for key in promise.waiting {
            if let Some(parked) = self.unpark(key) {
                self.answer(now, key.0, parked.claim, parked.arrived);
            }
        }
    }
}

/// Compares what is exported with what was promised.
fn check_promised(spec: &ExportSpec, promised: &Reference) -> Result<()> {
    let differs = |kind, what: &str, promised: &dyn Display, made: &dyn Display| {
        let text = format!("the reference was issued for {what} `{promised}`, exported is `{made}`");
        Err(Error::new(kind, "export", text).with_hint("export what the reference was issued for"))
    };
    let num_blocks = spec.blocks.len() as u64;
    if spec.id != promised.export_id {
        differs(ErrorKind::Config, "id", &promised.export_id, &spec.id)
    } else if spec.kind != promised.kind {
        let (promised, made) = (promised.kind.as_str(), spec.kind.as_str());
        differs(ErrorKind::Config, "kind", &promised, &made)
    } else if spec.cache != promised.cache {
        differs(ErrorKind::Config, "cache", &promised.cache, &spec.cache)
    } else if spec.fingerprint != promised.fingerprint {
        let [promised, made] = [promised.fingerprint, spec.fingerprint].map(|print| hex::encode(&print[..8]));
        differs(ErrorKind::ReferenceFingerprint, "fingerprint", &promised, &made)
    } else if spec.digest != promised.digest {
        let (promised, made) = (hex::encode(&promised.digest), hex::encode(&spec.digest));
        differs(ErrorKind::ReferenceDigest, "digest", &promised, &made)
    } else if num_blocks != u64::from(promised.num_blocks) {
        differs(ErrorKind::Layout, "blocks", &promised.num_blocks, &num_blocks)
    } else if spec.num_tokens != promised.num_tokens {
        differs(ErrorKind::Config, "tokens", &promised.num_tokens, &spec.num_tokens)
    } else if spec.consumers != promised.consumers {
        differs(ErrorKind::Config, "consumers", &promised.consumers, &spec.consumers)
    } else {
        Ok(())
    }
}

fn unmade(text: String) -> Error {
    Error::new(ErrorKind::ReferenceUnknown, "claim", text)
        .with_hint("ask the owner for a new reference, or recompute the prefix")
}
