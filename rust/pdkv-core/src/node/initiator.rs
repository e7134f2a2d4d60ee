//! The side that begins transfers: claims, starts movers, asks for the fence.

use core::time::Duration;

use super::{Action, Node, Now, Role, Timer, misplaced};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{Incarnation, PeerKey, TransferId};
use crate::reference::{ExportKind, Reference};
use crate::transfer::{Effect, Event, Machine, Outcome, TransferSpec, TransferState};
use crate::wire::{Abandon, Claim, ClaimStatus, Done, Grant, Message, Reject, Renew, Renewed, Status, violation};

/// Writers remembered that could not report; the oldest are forgotten first.
const MAX_UNREPORTED: usize = 4096;

#[derive(Debug)]
pub(super) struct Transfer {
    peer: PeerKey,
    machine: Machine,
    num_blocks: u32,
    reference: Reference,
    wants_table: bool,
    claimed_at: Now,
    deadline: Now,
    timeout_text: String,
    grant: Option<Grant>,
}

impl Node {
    /// Begins a transfer over a channel that we opened. Whatever happens, it finishes and quiesces
    /// exactly once, and finishes at the latest when its timeout is over.
    ///
    /// # Errors
    /// `PeerLost` when the channel is down, `ReferenceRestarted` when the peer is another life of the
    /// owner, `Capacity` when too many transfers run, `Config` for a zero timeout or a channel on
    /// which we serve. Nothing has begun then.
    pub fn begin(&mut self, now: Now, peer: PeerKey, spec: TransferSpec) -> Result<TransferId> {
        let limit = self.config.max_transfers_per_peer;
        let Some(record) = self.peers.get_mut(&peer) else {
            return Err(self.no_peer("begin transfer", peer));
        };
        if record.role != Role::Initiator {
            let text = format!(
                "engine `{}` opened this channel, only its side starts transfers on it",
                record.remote.name
            );
            return Err(
                Error::new(ErrorKind::Config, "begin transfer", text).with_hint("connect to the peer's address")
            );
        }
        if spec.reference.incarnation != record.remote.incarnation {
            let text = format!(
                "the reference is of life `{}` of the engine, life `{}` is connected",
                spec.reference.incarnation, record.remote.incarnation
            );
            return Err(Error::new(ErrorKind::ReferenceRestarted, "begin transfer", text)
                .with_hint("the owner restarted: its exports are gone"));
        }
        if record.busy >= limit {
            let text = format!("`{limit}` transfers with engine `{}` are running", record.remote.name);
            return Err(Error::new(ErrorKind::Capacity, "begin transfer", text).with_hint("wait for some to end"));
        }
        if spec.timeout < Duration::from_millis(1) {
            let text = format!("timeout `{:?}` is shorter than a millisecond", spec.timeout);
            return Err(Error::new(ErrorKind::Config, "begin transfer", text));
        }
        spec.reference.check()?;
        record.busy += 1;
        let transfer = TransferId(self.next_transfer);
        self.next_transfer += 1;
        self.stats.transfers_begun += 1;
        let deadline = now.saturating_add(spec.timeout);
        self.timers.arm(Timer::Transfer(transfer), deadline);
        self.transfers.insert(
            transfer,
            Transfer {
                peer,
                machine: Machine::new(),
                num_blocks: spec.num_blocks,
                reference: spec.reference.clone(),
                wants_table: spec.wants_table,
                claimed_at: now,
                deadline,
                timeout_text: format!("not finished within its timeout of `{:?}`", spec.timeout),
                grant: None,
            },
        );
        let claim = Claim {
            transfer,
            reference: spec.reference,
            expected_digest: spec.expected_digest,
            expected_fingerprint: spec.expected_fingerprint,
            first_block: spec.first_block,
            num_blocks: spec.num_blocks,
            first_layer: spec.selection.first_layer,
            num_layers: spec.selection.num_layers,
            transport: spec.transport,
            remaining: spec.timeout,
            wants_table: spec.wants_table,
            order: spec.order,
        };
        self.send(peer, Message::Claim(Box::new(claim)));
        Ok(transfer)
    }

    /// The mover has ended: with all bytes placed, or stopped by an error. Either way it touches the
    /// transfer's memory no more. Reports for unknown transfers are counted.
    pub fn moved(&mut self, now: Now, transfer: TransferId, result: Result<u64>) {
        if !self.step(now, transfer, Event::MoveEnded(result)) {
            self.stats.stray_moves += 1;
        }
    }

    /// Cancels a transfer. It finishes at once and quiesces when the mover has let go. Cancelling an
    /// ended or unknown transfer does nothing.
    pub fn cancel(&mut self, now: Now, transfer: TransferId) {
        self.step(now, transfer, Event::Cancelled);
    }

    /// Where a transfer stands; `None` once it is quiesced.
    pub fn transfer_state(&self, transfer: TransferId) -> Option<TransferState> {
        self.transfers.get(&transfer).map(|t| t.machine.state())
    }

    /// Asks the owner to extend a lease; answered by [`Action::Renewed`] with the returned number, at
    /// the latest when the peer would count as silent.
    ///
    /// # Errors
    /// `PeerLost` when the channel is down.
    pub fn renew_remote(&mut self, now: Now, peer: PeerKey, reference: Reference, extend: Duration) -> Result<u64> {
        if !self.peers.contains_key(&peer) {
            return Err(self.no_peer("renew", peer));
        }
        let request = self.next_request;
        self.next_request += 1;
        self.renewals.insert(request, peer);
        let deadline = now.saturating_add(self.config.peer_timeout);
        self.timers.arm(Timer::Renewal(request), deadline);
        self.send(
            peer,
            Message::Renew(Box::new(Renew {
                request,
                reference,
                extend,
            })),
        );
        Ok(request)
    }

    /// Tells the owner that a consumer won't come, which frees its slot. The same `consumer` number
    /// again changes nothing; consumers of one engine need different numbers.
    ///
    /// # Errors
    /// `PeerLost` when the channel is down.
    pub fn reject(&mut self, peer: PeerKey, reference: Reference, consumer: u64) -> Result<()> {
        if !self.peers.contains_key(&peer) {
            return Err(self.no_peer("reject", peer));
        }
        self.send(peer, Message::Reject(Box::new(Reject { reference, consumer })));
        Ok(())
    }

    pub(super) fn handle_as_initiator(&mut self, now: Now, peer: PeerKey, message: Message) -> Result<()> {
        let (transfer, event) = match message {
            Message::Grant(grant) => return self.on_grant(now, peer, grant),
            Message::Renewed(renewed) => {
                self.on_renewed(peer, renewed);
                return Ok(());
            }
            Message::StatusReply(reply) => {
                self.on_status_reply(now, peer, reply.transfer, reply.status);
                return Ok(());
            }
            Message::Refuse(m) => (m.transfer, Event::Refused(m.fault.into_error("claim"))),
            Message::Ack(m) => (m.transfer, Event::Acked),
            Message::Nack(m) => (m.transfer, Event::Nacked(m.fault.into_error("fence"))),
            Message::Revoke(m) => {
                // A claim that we don't hold any more: say again that we are out of the memory, or the
                // owner could wait for ever. One that still runs over an earlier channel is not out yet;
                // the owner asks again.
                if !self.transfers.contains_key(&m.transfer) {
                    self.stats.stray_messages += 1;
                    let abandon = Abandon {
                        transfer: m.transfer,
                        reason: m.fault.kind,
                    };
                    self.send(peer, Message::Abandon(abandon));
                    return Ok(());
                }
                (m.transfer, Event::Revoked(m.fault.into_error("transfer")))
            }
            other => return Err(misplaced(&other)),
        };
        if !(self.is_with(peer, transfer) && self.step(now, transfer, event)) {
            self.stats.stray_messages += 1;
        }
        Ok(())
    }

    /// Whether `transfer` is alive and runs over this channel: a peer can't end another's transfer.
    fn is_with(&self, peer: PeerKey, transfer: TransferId) -> bool {
        self.transfers.get(&transfer).is_some_and(|t| t.peer == peer)
    }

    fn on_grant(&mut self, now: Now, peer: PeerKey, grant: Grant) -> Result<()> {
        let id = grant.transfer;
        let Some(transfer) = self.transfers.get_mut(&id).filter(|t| t.peer == peer) else {
            self.stats.stray_messages += 1;
            return Ok(());
        };
        if transfer.machine.state() != TransferState::Claiming {
            self.stats.stray_messages += 1;
            return Ok(());
        }
        let asked = (transfer.num_blocks, transfer.reference.cache, transfer.wants_table);
        if (grant.num_blocks, grant.cache, grant.blocks.is_some()) != asked {
            return Err(violation(format!(
                "grant for transfer `{id}` is not for what was claimed"
            )));
        }
        // Counted from when the claim left, so that no delay on the way can stretch it.
        let granted_until = transfer.claimed_at.saturating_add(grant.remaining);
        if granted_until < transfer.deadline {
            transfer.deadline = granted_until;
            transfer.timeout_text = format!("not finished within the `{:?}` that the owner allows", grant.remaining);
            self.timers.arm(Timer::Transfer(id), granted_until);
        }
        transfer.grant = Some(grant);
        self.step(now, id, Event::Granted);
        Ok(())
    }

    fn on_status_reply(&mut self, now: Now, peer: PeerKey, id: TransferId, status: ClaimStatus) {
        let fencing = self
            .transfers
            .get(&id)
            .filter(|t| t.peer == peer && t.machine.state() == TransferState::Fencing);
        let Some(transfer) = fencing else {
            self.stats.stray_messages += 1;
            return;
        };
        let bytes = transfer.machine.bytes();
        match status {
            ClaimStatus::Active => self.send(peer, Message::Done(Done { transfer: id, bytes })),
            ClaimStatus::Completed => {
                self.step(now, id, Event::Acked);
            }
            ClaimStatus::Failed(fault) => {
                self.step(now, id, Event::Nacked(fault.into_error("fence")));
            }
            ClaimStatus::Unknown => {
                let error = Error::new(ErrorKind::Transfer, "fence", "the owner has forgotten the claim");
                self.step(now, id, Event::Nacked(error));
            }
        }
    }

    fn on_renewed(&mut self, peer: PeerKey, renewed: Renewed) {
        if self.renewals.get(&renewed.request) != Some(&peer) {
            self.stats.stray_messages += 1;
            return;
        }
        self.renewals.remove(&renewed.request);
        self.timers.disarm(Timer::Renewal(renewed.request));
        let result = renewed.result.map_err(|fault| fault.into_error("renew"));
        self.actions.push_back(Action::Renewed {
            peer,
            request: renewed.request,
            result,
        });
    }

    pub(super) fn renewal_over(&mut self, request: u64) {
        let Some(peer) = self.renewals.remove(&request) else {
            return;
        };
        let text = format!("the owner did not answer within `{:?}`", self.config.peer_timeout);
        let result = Err(Error::new(ErrorKind::TransferTimeout, "renew", text));
        self.actions.push_back(Action::Renewed { peer, request, result });
    }

    pub(super) fn renewals_lost(&mut self, peer: PeerKey, error: &Error) {
        let lost: Vec<u64> = self
            .renewals
            .iter()
            .filter(|&(_, p)| *p == peer)
            .map(|(&r, _)| r)
            .collect();
        for request in lost {
            self.renewals.remove(&request);
            self.timers.disarm(Timer::Renewal(request));
            self.actions.push_back(Action::Renewed {
                peer,
                request,
                result: Err(error.clone()),
            });
        }
    }

    pub(super) fn transfers_lost(&mut self, now: Now, peer: PeerKey, error: &Error) {
        let lost: Vec<TransferId> = self
            .transfers
            .iter()
            .filter(|(_, t)| t.peer == peer)
            .map(|(&id, _)| id)
            .collect();
        for transfer in lost {
            self.step(
                now,
                transfer,
                Event::PeerLost(error.clone().with_scope(crate::Scope::Transfer)),
            );
        }
    }

    pub(super) fn transfer_over(&mut self, now: Now, id: TransferId) {
        let Some(transfer) = self.transfers.get(&id) else {
            return;
        };
        let error = Error::new(ErrorKind::TransferTimeout, "transfer", transfer.timeout_text.clone());
        self.step(now, id, Event::TimedOut(error));
    }

    pub(super) fn fence_again(&mut self, now: Now, id: TransferId) {
        let Some(transfer) = self.transfers.get(&id) else {
            return;
        };
        if transfer.machine.state() == TransferState::Fencing {
            let peer = transfer.peer;
            self.stats.fences_reasked += 1;
            self.send(peer, Message::Status(Status { transfer: id }));
            self.timers.arm(Timer::FenceAgain(id), now + self.config.heartbeat);
        }
    }

    /// Runs one event through the machine and carries out its effects; `false` for a stray event.
    fn step(&mut self, now: Now, id: TransferId, event: Event) -> bool {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return false;
        };
        let peer = transfer.peer;
        let Some(effects) = transfer.machine.on(event) else {
            return false;
        };
        for effect in effects {
            match effect {
                Effect::StartMove => {
                    if let Some(grant) = self.transfers.get_mut(&id).and_then(|t| t.grant.take()) {
                        self.actions.push_back(Action::Move {
                            transfer: id,
                            peer,
                            grant,
                        });
                    }
                }
                Effect::StopMove => self.actions.push_back(Action::Stop { transfer: id }),
                Effect::SendDone(bytes) => {
                    self.send(peer, Message::Done(Done { transfer: id, bytes }));
                    self.timers.arm(Timer::FenceAgain(id), now + self.config.heartbeat);
                }
                Effect::SendAbandon(reason) => self.send(peer, Message::Abandon(Abandon { transfer: id, reason })),
                Effect::Finish(outcome) => self.finish(id, outcome),
                Effect::Quiesce => self.quiesce(id, peer),
            }
        }
        true
    }

    fn finish(&mut self, id: TransferId, outcome: Outcome) {
        match outcome {
            Outcome::Done { .. } => self.stats.transfers_done += 1,
            Outcome::Failed { .. } => self.stats.transfers_failed += 1,
            Outcome::Cancelled { .. } => self.stats.transfers_cancelled += 1,
        }
        self.timers.disarm(Timer::Transfer(id));
        self.timers.disarm(Timer::FenceAgain(id));
        self.actions.push_back(Action::Finished { transfer: id, outcome });
    }

    fn quiesce(&mut self, id: TransferId, peer: PeerKey) {
        let ended = self.transfers.remove(&id);
        if let Some(record) = self.peers.get_mut(&peer) {
            record.busy = record.busy.saturating_sub(1);
        } else if let Some(transfer) = ended.filter(|t| t.reference.kind == ExportKind::Offer) {
            let life = transfer.reference.incarnation;
            self.unreported.insert(id, life);
            if self.unreported.len() > MAX_UNREPORTED {
                self.unreported.pop_first();
            }
            let is_owner = |p: &super::peers::Peer| p.role == Role::Initiator && p.remote.incarnation == life;
            let again = self.peers.iter().find(|(_, p)| is_owner(p)).map(|(&key, _)| key);
            if let Some(peer) = again {
                self.report_writers_out(peer, life);
            }
        }
        self.actions.push_back(Action::Quiesced { transfer: id });
    }

    /// Tells an owner that is connected again which writers are out of its memory: it may still hold
    /// the blocks of offers for them.
    pub(super) fn report_writers_out(&mut self, peer: PeerKey, life: Incarnation) {
        let ids: Vec<_> = self
            .unreported
            .iter()
            .filter(|&(_, l)| *l == life)
            .map(|(&id, _)| id)
            .collect();
        for transfer in ids {
            self.unreported.remove(&transfer);
            self.send(
                peer,
                Message::Abandon(Abandon {
                    transfer,
                    reason: ErrorKind::PeerLost,
                }),
            );
        }
    }
}
