//! Claims of peers on our exports: judged, served, fenced, taken back.
//!
//! A claim is judged in a fixed order, so that each way a reference can be bad has its own answer:
//! life, tag, state, digest, fingerprint, range, slot. The fence asks the same state again after the
//! last byte. A reader's claim ends when it is taken back; a writer's stays on record until nobody can
//! write for it any more.

use std::sync::Arc;

use super::{Action, Node, Now, Role, Timer, misplaced};
use crate::block_table::BlockTable;
use crate::error::{Error, ErrorKind, Result};
use crate::export::Area;
use crate::hex;
use crate::id::{CacheId, ExportId, Incarnation, PeerKey, TransferId};
use crate::plan::{Selection, WireOrder};
use crate::reference::ExportKind;
use crate::wire::{Claim, ClaimStatus, Fault, Grant, Message, Refuse, Revoke, violation};

/// What data streams need to serve a claim.
#[derive(Clone, Debug)]
pub struct ClaimView {
    /// The export it is for.
    pub export: ExportId,
    /// Whether the peer reads or writes.
    pub kind: ExportKind,
    /// Our cache.
    pub cache: CacheId,
    /// The claimed blocks, in logical order.
    pub blocks: Arc<BlockTable>,
    /// The claimed layers.
    pub selection: Selection,
    /// Byte order of the stream.
    pub order: Option<WireOrder>,
    /// Transport the initiator named.
    pub transport: String,
    /// Taken back: serve nothing more.
    pub revoked: bool,
}

#[derive(Debug)]
pub(super) struct ClaimRecord {
    pub(super) view: ClaimView,
    area: Area,
    /// The initiator's life.
    pub(super) claimant: Option<Incarnation>,
    /// Why it was taken back; only writers stay on record then, until they are out.
    pub(super) revoked: Option<Error>,
    /// The writer's channel is gone.
    pub(super) lost: bool,
    /// The writer is known to be unable to write.
    dead: bool,
    /// Data streams of ours that touch the memory for this claim.
    pub(super) serving: usize,
    /// The initiator asked for the fence while streams of ours were still at work.
    pub(super) fence_waits: bool,
}

impl ClaimRecord {
    /// Whether nobody can touch the memory for this claim any more.
    fn is_out(&self) -> bool {
        self.dead && self.serving == 0
    }
}

impl Node {
    /// What a data stream needs to serve a claim; `None` for a claim that is not alive.
    pub fn claim_view(&self, peer: PeerKey, transfer: TransferId) -> Option<ClaimView> {
        self.claims.get(&(peer, transfer)).map(|record| record.view.clone())
    }

    /// Why a claim can't be served: what took it back, or that there is none.
    pub fn why_ended(&self, peer: PeerKey, transfer: TransferId) -> Error {
        let revoked = self
            .claims
            .get(&(peer, transfer))
            .and_then(|record| record.revoked.clone());
        let ended = || match self.peers.get(&peer)?.ended.get(&transfer)? {
            ClaimStatus::Failed(fault) => Some(fault.clone().into_error("serve")),
            _ => None,
        };
        revoked.or_else(ended).unwrap_or_else(|| {
            if !self.peers.contains_key(&peer) {
                return self.no_peer("serve", peer);
            }
            let text = format!("transfer `{transfer}` holds no claim here");
            Error::new(ErrorKind::ReferenceUnknown, "serve", text)
        })
    }

    /// A data stream of ours starts to touch memory for a claim; pair with
    /// [`serve_ended`](Self::serve_ended). `None` when it must not.
    pub fn serve_started(&mut self, peer: PeerKey, transfer: TransferId) -> Option<ClaimView> {
        let record = self.claims.get_mut(&(peer, transfer))?;
        if record.view.revoked {
            return None;
        }
        record.serving += 1;
        Some(record.view.clone())
    }

    /// A data stream of ours touches memory for a claim no more. An error takes the claim back and
    /// tells the initiator at once. A fence that was asked for meanwhile is answered when the last
    /// stream has ended.
    pub fn serve_ended(&mut self, now: Now, peer: PeerKey, transfer: TransferId, result: Result<()>) {
        let key = (peer, transfer);
        let Some(record) = self.claims.get_mut(&key) else {
            return;
        };
        record.serving = record.serving.saturating_sub(1);
        let last = record.serving == 0;
        let fence_waits = record.fence_waits;
        if let Err(error) = result {
            self.revoke(now, peer, transfer, &error);
        }
        if last && fence_waits {
            self.on_done(peer, transfer);
        } else {
            self.end_if_out(key);
        }
    }

    /// Claims of writers that may still be in our memory.
    pub fn writers(&self) -> usize {
        let writes = |record: &&ClaimRecord| record.view.kind == ExportKind::Offer;
        self.claims.values().filter(writes).count()
    }

    /// The transfers for which a writer may still be in our memory: those of one peer's claims.
    pub fn writers_of(&self, peer: PeerKey) -> Vec<TransferId> {
        let mut keys = self.claims_of(peer);
        keys.retain(|key| record_kind(&self.claims, *key) == Some(ExportKind::Offer));
        keys.into_iter().map(|(_, transfer)| transfer).collect()
    }

    /// The process behind `peer` can't write into our memory any more: it died, or its links are
    /// closed. Ends the claims of writers that waited for this.
    pub fn writer_dead(&mut self, _now: Now, peer: PeerKey) {
        for key in self.claims_of(peer) {
            let Some(record) = self.claims.get_mut(&key) else {
                continue;
            };
            record.dead = true;
            if record.revoked.is_none() {
                record.revoked = Some(writer_lost());
                record.view.revoked = true;
                self.actions.push_back(Action::ServeStop { peer, transfer: key.1 });
            }
            self.end_if_out(key);
        }
    }

    pub(super) fn handle_as_owner(&mut self, now: Now, peer: PeerKey, message: Message) -> Result<()> {
        match message {
            Message::Claim(claim) => return self.on_claim(now, peer, *claim),
            Message::Done(done) => self.on_done(peer, done.transfer),
            Message::Abandon(abandon) => self.on_abandon(peer, abandon.transfer, abandon.reason),
            Message::Status(status) => self.on_status(peer, status.transfer),
            Message::Renew(renew) => self.on_renew(now, peer, &renew),
            Message::Reject(reject) => self.on_reject(now, peer, &reject),
            other => return Err(misplaced(&other)),
        }
        Ok(())
    }

    /// Refuses a claim that came in, whatever the node would say of it, for a reason that only its user can know.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    pub fn refuse_claim(&mut self, now: Now, peer: PeerKey, claim: Claim, error: &Error) -> Result<()> {
        match self.heard_from(now, peer) {
            None => self.stats.messages_after_down += 1,
            Some(Role::Initiator) => return Err(misplaced(&Message::Claim(Box::new(claim)))),
            Some(Role::Owner) if self.is_new(peer, claim.transfer) => self.refuse(peer, claim.transfer, error),
            Some(Role::Owner) => {}
        }
        Ok(())
    }

    /// Takes a claim back, for a reason that only the node's user can know. Of one that has ended nothing is said.
    pub fn take_back(&mut self, now: Now, peer: PeerKey, transfer: TransferId, error: &Error) {
        self.revoke(now, peer, transfer, error);
    }

    /// Whether a claim is none that came before; notes it.
    fn is_new(&mut self, peer: PeerKey, transfer: TransferId) -> bool {
        let Some(record) = self.peers.get_mut(&peer) else {
            return false;
        };
        if record.highest_claim.is_some_and(|highest| transfer <= highest) {
            self.stats.duplicate_claims += 1;
            return false;
        }
        record.highest_claim = Some(transfer);
        true
    }

    fn on_claim(&mut self, now: Now, peer: PeerKey, claim: Claim) -> Result<()> {
        let transfer = claim.transfer;
        if !self.is_new(peer, transfer) {
            return Ok(());
        }
        if claim.first_block.checked_add(claim.num_blocks).is_none()
            || claim.first_layer.checked_add(claim.num_layers).is_none()
        {
            return Err(violation(format!("claim `{transfer}` asks for a range beyond 32 bits")));
        }
        if !self.is_ahead(&claim.reference) {
            self.answer(now, peer, claim, now);
        } else if let Err(error) = self.park(now, peer, claim) {
            self.refuse(peer, transfer, &error);
        }
        Ok(())
    }

    /// Judges a claim that arrived now or, if it was parked, a while ago.
    pub(super) fn answer(&mut self, now: Now, peer: PeerKey, claim: Claim, arrived: Now) {
        let transfer = claim.transfer;
        match self.judge(now, peer, claim, arrived) {
            Ok(grant) => {
                self.stats.claims_granted += 1;
                self.send(peer, Message::Grant(grant));
            }
            Err(error) => self.refuse(peer, transfer, &error),
        }
    }

    pub(super) fn refuse(&mut self, peer: PeerKey, transfer: TransferId, error: &Error) {
        self.stats.claims_refused += 1;
        let fault = Fault::of(error);
        if let Some(record) = self.peers.get_mut(&peer) {
            record.remember(transfer, ClaimStatus::Failed(fault.clone()));
        }
        self.send(peer, Message::Refuse(Refuse { transfer, fault }));
    }

    /// The checks of the module's documentation, in their order; then the claim is on record.
    fn judge(&mut self, now: Now, peer: PeerKey, claim: Claim, arrived: Now) -> Result<Grant> {
        let export = claim.reference.export_id;
        self.check_reference(&claim.reference)?;
        let record = self.exports.get_mut(&export).ok_or_else(unknown_export)?;
        check_wanted(&claim, &record.spec.digest, &record.spec.fingerprint)?;
        let area = Area {
            first_block: claim.first_block,
            num_blocks: claim.num_blocks,
            first_layer: claim.first_layer,
            num_layers: claim.num_layers,
        };
        let exported = u32::try_from(record.blocks.len()).unwrap_or(u32::MAX);
        area.check(exported, record.spec.num_layers)?;
        // Both sides count from when the claim left, so time in the parking place is time of the transfer.
        let remaining = claim.remaining.min(self.config.max_claim);
        if arrived.saturating_add(remaining) <= now {
            return Err(no_time());
        }
        let limit = self.config.max_transfers_per_peer;
        let owner_busy = self.peers.get(&peer).is_none_or(|p| p.busy >= limit);
        if owner_busy {
            let text = format!("`{limit}` claims of this peer are alive");
            return Err(Error::new(ErrorKind::Capacity, "claim", text).with_hint("wait for some to end"));
        }
        let blocks = if area.num_blocks == exported {
            Arc::clone(&record.blocks)
        } else {
            Arc::new(
                record
                    .blocks
                    .slice(area.first_block as usize, area.num_blocks as usize)?,
            )
        };
        if claim.wants_table && !crate::wire::table_fits(&blocks) {
            let text = format!("the table of `{}` blocks does not fit one message", blocks.len());
            return Err(Error::new(ErrorKind::Capacity, "claim", text).with_hint("claim the blocks in parts"));
        }
        let key = (peer, claim.transfer);
        record.admit(key, area)?;
        let grant = Grant {
            transfer: claim.transfer,
            cache: record.spec.cache,
            num_blocks: claim.num_blocks,
            blocks: claim.wants_table.then(|| BlockTable::clone(&blocks)),
            remaining,
        };
        let view = ClaimView {
            export,
            kind: record.spec.kind,
            cache: record.spec.cache,
            blocks,
            selection: Selection::layers(claim.first_layer, claim.num_layers),
            order: claim.order,
            transport: claim.transport,
            revoked: false,
        };
        let claim = ClaimRecord {
            view,
            area,
            claimant: self.peers.get(&peer).map(|record| record.remote.incarnation),
            revoked: None,
            lost: false,
            dead: false,
            serving: 0,
            fence_waits: false,
        };
        self.claims.insert(key, claim);
        self.timers
            .arm(Timer::Claim(peer, key.1), arrived.saturating_add(remaining));
        if let Some(record) = self.peers.get_mut(&peer) {
            record.busy += 1;
        }
        Ok(grant)
    }

    pub(super) fn claim_over(&mut self, now: Now, peer: PeerKey, transfer: TransferId) {
        let error = Error::new(
            ErrorKind::TransferTimeout,
            "transfer",
            "the claim's time is over at the owner",
        );
        self.revoke(now, peer, transfer, &error);
    }

    pub(super) fn revoke_again(&mut self, now: Now, peer: PeerKey, transfer: TransferId) {
        let Some(record) = self.claims.get(&(peer, transfer)) else {
            return;
        };
        let Some(error) = &record.revoked else { return };
        let to = if record.lost {
            self.channel_to(record.claimant)
        } else {
            Some(peer)
        };
        // Without a channel it is taken up again when the writer connects.
        let Some(to) = to else { return };
        let fault = Fault::of(error);
        self.timers
            .arm(Timer::RevokeAgain(peer, transfer), now + self.config.heartbeat);
        self.send(to, Message::Revoke(Revoke { transfer, fault }));
    }

    fn channel_to(&self, life: Option<Incarnation>) -> Option<PeerKey> {
        let mut peers = self.peers.iter();
        peers
            .find(|(_, p)| p.role == Role::Owner && Some(p.remote.incarnation) == life)
            .map(|(&key, _)| key)
    }

    /// A writer is connected again: what it said when it left the memory may be lost with the channel
    /// it lost, so it is asked until it says so.
    pub(super) fn ask_writer(&mut self, now: Now, life: Incarnation) {
        let lost = |(&key, record): (&(PeerKey, TransferId), &ClaimRecord)| {
            (record.lost && record.claimant == Some(life)).then_some(key)
        };
        let keys: Vec<_> = self.claims.iter().filter_map(lost).collect();
        for (peer, transfer) in keys {
            self.revoke_again(now, peer, transfer);
        }
    }

    pub(super) fn claims_lost(&mut self, _now: Now, peer: PeerKey, error: &Error) {
        for key in self.claims_of(peer) {
            let Some(record) = self.claims.get_mut(&key) else {
                continue;
            };
            record.lost = true;
            self.timers.disarm(Timer::Claim(peer, key.1));
            self.timers.disarm(Timer::RevokeAgain(peer, key.1));
            if record.revoked.is_none() {
                record.revoked = Some(error.clone());
                record.view.revoked = true;
                self.actions.push_back(Action::ServeStop { peer, transfer: key.1 });
            }
            if record.view.kind == ExportKind::Export {
                self.end_claim(key, Err(error.clone()));
            }
        }
    }

    /// Takes a claim back. A reader's claim ends here: its fence will fail. A writer's stays on record
    /// until it is known to be out of the memory.
    pub(super) fn revoke(&mut self, now: Now, peer: PeerKey, transfer: TransferId, error: &Error) {
        let key = (peer, transfer);
        let Some(record) = self.claims.get_mut(&key).filter(|record| record.revoked.is_none()) else {
            return;
        };
        record.revoked = Some(error.clone());
        record.view.revoked = true;
        self.stats.claims_revoked += 1;
        self.timers.disarm(Timer::Claim(peer, transfer));
        self.actions.push_back(Action::ServeStop { peer, transfer });
        self.send(
            peer,
            Message::Revoke(Revoke {
                transfer,
                fault: Fault::of(error),
            }),
        );
        match record_kind(&self.claims, key) {
            Some(ExportKind::Offer) => self
                .timers
                .arm(Timer::RevokeAgain(peer, transfer), now + self.config.heartbeat),
            _ => self.end_claim(key, Err(error.clone())),
        }
    }

    /// The initiator is out of the memory; streams of ours may still be in it.
    pub(super) fn writer_out(&mut self, key: (PeerKey, TransferId)) {
        if let Some(record) = self.claims.get_mut(&key) {
            record.dead = true;
            self.timers.disarm(Timer::Claim(key.0, key.1));
            self.timers.disarm(Timer::RevokeAgain(key.0, key.1));
        }
        self.end_if_out(key);
    }

    fn end_if_out(&mut self, key: (PeerKey, TransferId)) {
        let Some(record) = self.claims.get(&key) else { return };
        if record.is_out() || (record.dead && record.view.kind == ExportKind::Export) {
            let error = record.revoked.clone();
            self.end_claim(key, Err(error.unwrap_or_else(writer_lost)));
        }
    }

    /// Takes a claim off the record, once and for all.
    pub(super) fn end_claim(&mut self, key: (PeerKey, TransferId), result: Result<()>) {
        let Some(record) = self.claims.remove(&key) else { return };
        let (peer, transfer) = key;
        self.timers.disarm(Timer::Claim(peer, transfer));
        self.timers.disarm(Timer::RevokeAgain(peer, transfer));
        let success = result.is_ok();
        let status = match result {
            Ok(()) => ClaimStatus::Completed,
            Err(error) => ClaimStatus::Failed(Fault::of(&error)),
        };
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.busy = peer.busy.saturating_sub(1);
            peer.remember(transfer, status);
        }
        if let Some(export) = self.exports.get_mut(&record.view.export) {
            export.end_claim(key, record.area, success);
        }
        self.settle(record.view.export);
    }

    fn claims_of(&self, peer: PeerKey) -> Vec<(PeerKey, TransferId)> {
        let all = (peer, TransferId(0))..=(peer, TransferId(u64::MAX));
        self.claims.range(all).map(|(&key, _)| key).collect()
    }
}

fn record_kind(
    claims: &std::collections::BTreeMap<(PeerKey, TransferId), ClaimRecord>,
    key: (PeerKey, TransferId),
) -> Option<ExportKind> {
    claims.get(&key).map(|record| record.view.kind)
}

/// Compares what the consumer expects with what an export holds.
pub(super) fn check_wanted(claim: &Claim, holds: &[u8], fingerprint: &[u8; 32]) -> Result<()> {
    if let Some(digest) = &claim.expected_digest
        && digest != holds
    {
        let text = format!(
            "the export holds prefix `{}`, the consumer expects `{}`",
            hex::encode(holds),
            hex::encode(digest)
        );
        return Err(
            Error::new(ErrorKind::ReferenceDigest, "claim", text).with_hint("the reference is of another prompt")
        );
    }
    if claim.expected_fingerprint != *fingerprint {
        let text = format!(
            "the export's bytes mean `{}`, the consumer's cache `{}`",
            hex::encode(&fingerprint[..8]),
            hex::encode(&claim.expected_fingerprint[..8])
        );
        return Err(Error::new(ErrorKind::ReferenceFingerprint, "claim", text)
            .with_hint("model, dtype, layout meaning and shard must be the same on both sides"));
    }
    Ok(())
}

pub(super) fn no_time() -> Error {
    Error::new(
        ErrorKind::TransferTimeout,
        "claim",
        "the claim arrived with no time left",
    )
}

fn writer_lost() -> Error {
    Error::new(ErrorKind::PeerLost, "transfer", "the writer is gone")
}

fn unknown_export() -> Error {
    Error::new(ErrorKind::ReferenceUnknown, "claim", "the owner knows no such export")
}
