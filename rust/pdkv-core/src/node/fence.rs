//! The end of a claim as its initiator tells it: done, abandoned, or asked about again.
//!
//! `Done` is answered by the same state that judged the claim, after the last byte and after the last
//! stream of ours that placed bytes for it.

use super::claims::ClaimRecord;
use super::{Action, Node};
use crate::error::{Error, ErrorKind};
use crate::id::{PeerKey, TransferId};
use crate::wire::{Ack, ClaimStatus, Fault, Message, Nack, StatusReply};

impl Node {
    /// Makes the fence of a claim fail, for a reason that only the node's user can know. The initiator hears of it as the answer to its
    /// `Done`; with [`take_back`](Self::take_back) at once.
    pub fn spoil(&mut self, peer: PeerKey, transfer: TransferId, error: &Error) {
        let Some(record) = self.claims.get_mut(&(peer, transfer)) else {
            return;
        };
        if record.revoked.is_none() {
            record.revoked = Some(error.clone());
            record.view.revoked = true;
            self.actions.push_back(Action::ServeStop { peer, transfer });
        }
    }

    pub(super) fn on_done(&mut self, peer: PeerKey, transfer: TransferId) {
        let key = (peer, transfer);
        let Some(record) = self.claims.get_mut(&key) else {
            self.answer_late_done(peer, transfer);
            return;
        };
        if record.serving > 0 {
            record.fence_waits = true;
            return;
        }
        match record.revoked.clone() {
            None => {
                self.stats.fences_valid += 1;
                // Whoever asks again after the fence may find other bytes in these blocks.
                self.actions.push_back(Action::ServeStop { peer, transfer });
                self.end_claim(key, Ok(()));
                self.send(peer, Message::Ack(Ack { transfer }));
            }
            // The writer says that it is done: revoked or not, it is out of the memory.
            Some(error) => {
                self.stats.fences_refused += 1;
                self.send(
                    peer,
                    Message::Nack(Nack {
                        transfer,
                        fault: Fault::of(&error),
                    }),
                );
                self.writer_out(key);
            }
        }
    }

    fn answer_late_done(&mut self, peer: PeerKey, transfer: TransferId) {
        let status = self.peers.get(&peer).and_then(|record| record.ended.get(&transfer));
        let answer = match status {
            Some(ClaimStatus::Completed) => Message::Ack(Ack { transfer }),
            Some(ClaimStatus::Failed(fault)) => Message::Nack(Nack {
                transfer,
                fault: fault.clone(),
            }),
            _ => Message::Nack(Nack {
                transfer,
                fault: Fault::of(&unknown_claim()),
            }),
        };
        self.stats.stray_messages += 1;
        self.send(peer, answer);
    }

    pub(super) fn on_abandon(&mut self, peer: PeerKey, transfer: TransferId, reason: ErrorKind) {
        let key = self.claim_key(peer, transfer);
        let Some(record) = self.claims.get_mut(&key) else {
            if self.abandon_parked(key) {
                self.stats.claims_abandoned += 1;
            } else {
                self.stats.stray_messages += 1;
            }
            return;
        };
        self.stats.claims_abandoned += 1;
        if record.revoked.is_none() {
            let text = format!("the initiator gave the claim back: {}", reason.slug());
            record.revoked = Some(Error::new(ErrorKind::TransferCancelled, "transfer", text));
            record.view.revoked = true;
            self.actions.push_back(Action::ServeStop { peer, transfer });
        }
        self.writer_out(key);
    }

    /// The claim that an initiator means: of this channel, or of one that it lost. Its numbers are unique
    /// within its life.
    fn claim_key(&self, peer: PeerKey, transfer: TransferId) -> (PeerKey, TransferId) {
        let life = self.peers.get(&peer).map(|record| record.remote.incarnation);
        let lost = |(key, record): (&(PeerKey, TransferId), &ClaimRecord)| {
            (key.1 == transfer && record.lost && record.claimant == life).then_some(*key)
        };
        let here = (peer, transfer);
        if self.claims.contains_key(&here) {
            here
        } else {
            self.claims.iter().find_map(lost).unwrap_or(here)
        }
    }

    pub(super) fn on_status(&mut self, peer: PeerKey, transfer: TransferId) {
        let status = match self.claims.get(&(peer, transfer)) {
            Some(ClaimRecord {
                revoked: Some(error), ..
            }) => ClaimStatus::Failed(Fault::of(error)),
            Some(_) => ClaimStatus::Active,
            // Not decided yet: the initiator goes on waiting for the answer to its claim.
            None if self.is_parked((peer, transfer)) => ClaimStatus::Active,
            None => {
                let ended = self.peers.get(&peer).and_then(|record| record.ended.get(&transfer));
                ended.cloned().unwrap_or(ClaimStatus::Unknown)
            }
        };
        self.send(peer, Message::StatusReply(StatusReply { transfer, status }));
    }
}

fn unknown_claim() -> Error {
    Error::new(ErrorKind::Transfer, "fence", "the owner knows no such claim")
}
