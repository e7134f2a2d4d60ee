//! Channels that are up, and whether anybody is still there.
//!
//! Liveness is the library's duty and the same for every transport: each side sends something at
//! least every heartbeat, and silence beyond the timeout ends the channel here, before the engine is
//! told.

use core::time::Duration;
use std::collections::BTreeMap;

use super::{Action, Node, Now, Timer};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{Incarnation, PeerKey, TransferId};
use crate::wire::{ClaimStatus, Goodbye, MAX_NOTIFY, Message, Notify, Ping, Pong};

/// Our part on a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// We connected: we start transfers.
    Initiator,
    /// We accepted: we serve claims.
    Owner,
}

/// Who is at the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemotePeer {
    /// Its name.
    pub name: String,
    /// Its life.
    pub incarnation: Incarnation,
    /// Silence after which it drops the channel; it hears from us three times as often.
    pub peer_timeout: Duration,
}

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) role: Role,
    pub(super) remote: RemotePeer,
    last_heard: Now,
    heartbeat: Duration,
    next_ping: u64,
    /// We noticed its silence late, and gave it time to speak.
    excused: bool,
    /// Claims alive (we own) or transfers alive (we began).
    pub(super) busy: usize,
    /// Claims that wait for their export to be made.
    pub(super) parked: usize,
    /// The highest claim seen; claims come in rising order, so what is lower is a duplicate.
    pub(super) highest_claim: Option<TransferId>,
    /// How the last claims ended, for questions and duplicates.
    pub(super) ended: BTreeMap<TransferId, ClaimStatus>,
}

/// Ended claims remembered per peer.
const MAX_ENDED: usize = 1024;

impl Peer {
    pub(super) fn remember(&mut self, transfer: TransferId, status: ClaimStatus) {
        self.ended.insert(transfer, status);
        if self.ended.len() > MAX_ENDED {
            self.ended.pop_first();
        }
    }
}

impl Node {
    /// A handshake has succeeded. `peer` must be new: keys are never used again.
    pub fn peer_up(&mut self, now: Now, peer: PeerKey, role: Role, remote: RemotePeer) {
        // A peer may ask for more pings than we would send, but not for a flood.
        let floor = self.config.heartbeat.min(Duration::from_millis(50));
        let heartbeat = self.config.heartbeat.min(remote.peer_timeout / 3).max(floor);
        let record = Peer {
            role,
            remote,
            last_heard: now,
            heartbeat,
            next_ping: 1,
            excused: false,
            busy: 0,
            parked: 0,
            highest_claim: None,
            ended: BTreeMap::new(),
        };
        let life = record.remote.incarnation;
        self.peers.insert(peer, record);
        match role {
            Role::Initiator => self.report_writers_out(peer, life),
            Role::Owner => self.ask_writer(now, life),
        }
        self.timers.arm(Timer::Heartbeat(peer), now + heartbeat);
        self.timers.arm(Timer::Silence(peer), now + self.config.peer_timeout);
    }

    /// The channel is gone. Ends everything that hung on it: transfers of ours fail, claims of readers
    /// end, claims of writers wait for [`writer_dead`](Self::writer_dead). Again is harmless.
    pub fn peer_down(&mut self, now: Now, peer: PeerKey, error: &Error) {
        if self.peers.remove(&peer).is_none() {
            return;
        }
        self.timers.disarm(Timer::Heartbeat(peer));
        self.timers.disarm(Timer::Silence(peer));
        self.renewals_lost(peer, error);
        self.transfers_lost(now, peer, error);
        self.claims_lost(now, peer, error);
        self.parked_lost(peer);
    }

    /// Who is at the other end of a channel that is up.
    pub fn remote(&self, peer: PeerKey) -> Option<&RemotePeer> {
        self.peers.get(&peer).map(|record| &record.remote)
    }

    /// Sends application bytes; they arrive after everything sent before them.
    ///
    /// # Errors
    /// `Capacity` for more than [`MAX_NOTIFY`] bytes, `PeerLost` when the channel is down.
    pub fn notify(&mut self, peer: PeerKey, bytes: Vec<u8>) -> Result<()> {
        if bytes.len() > MAX_NOTIFY {
            let text = format!(
                "notification of `{}` bytes, at most `{MAX_NOTIFY}` are sent",
                bytes.len()
            );
            return Err(Error::new(ErrorKind::Capacity, "notify", text));
        }
        if !self.peers.contains_key(&peer) {
            return Err(self.no_peer("notify", peer));
        }
        self.send(peer, Message::Notify(Notify { bytes }));
        Ok(())
    }

    /// Closes a channel in order: says goodbye, ends what hung on it, and asks for the close.
    pub fn close_peer(&mut self, now: Now, peer: PeerKey, reason: &str) {
        self.send(
            peer,
            Message::Goodbye(Goodbye {
                reason: reason.to_owned(),
            }),
        );
        self.drop_peer(
            now,
            peer,
            Error::new(ErrorKind::Closed, "close", format!("channel closed: {reason}")),
        );
    }

    fn drop_peer(&mut self, now: Now, peer: PeerKey, error: Error) {
        if self.peers.contains_key(&peer) {
            self.peer_down(now, peer, &error);
            self.actions.push_back(Action::Close { peer, error });
        }
    }

    pub(super) fn heard_from(&mut self, now: Now, peer: PeerKey) -> Option<Role> {
        let record = self.peers.get_mut(&peer)?;
        record.last_heard = record.last_heard.max(now);
        record.excused = false;
        Some(record.role)
    }

    pub(super) fn heartbeat(&mut self, now: Now, peer: PeerKey) {
        let Some(record) = self.peers.get_mut(&peer) else {
            return;
        };
        let sequence = record.next_ping;
        record.next_ping += 1;
        let next = now + record.heartbeat;
        self.timers.arm(Timer::Heartbeat(peer), next);
        self.send(peer, Message::Ping(Ping { sequence }));
    }

    pub(super) fn silence(&mut self, now: Now, peer: PeerKey) {
        let Some(record) = self.peers.get_mut(&peer) else {
            return;
        };
        let due = record.last_heard + self.config.peer_timeout;
        if due > now {
            self.timers.arm(Timer::Silence(peer), due);
            return;
        }
        // Whoever looks late stood still itself, on a machine that did so perhaps, and the peer with it.
        if now.saturating_sub(due) > record.heartbeat && !std::mem::replace(&mut record.excused, true) {
            self.timers
                .arm(Timer::Silence(peer), now + self.config.peer_timeout / 2);
            return;
        }
        let text = format!(
            "engine `{}` was silent for `{:?}`",
            record.remote.name, self.config.peer_timeout
        );
        self.stats.peers_silent += 1;
        self.drop_peer(now, peer, Error::new(ErrorKind::PeerLost, "heartbeat", text));
    }

    pub(super) fn on_ping(&mut self, peer: PeerKey, ping: Ping) {
        self.send(
            peer,
            Message::Pong(Pong {
                sequence: ping.sequence,
            }),
        );
    }

    pub(super) fn on_goodbye(&mut self, now: Now, peer: PeerKey, goodbye: &Goodbye) {
        let text = format!("peer closed the channel: {}", goodbye.reason);
        self.drop_peer(now, peer, Error::new(ErrorKind::PeerLost, "goodbye", text));
    }

    pub(super) fn on_notify(&mut self, peer: PeerKey, notify: Notify) {
        let name = self
            .peers
            .get(&peer)
            .map(|record| record.remote.name.clone())
            .unwrap_or_default();
        self.actions.push_back(Action::Notified {
            peer,
            name,
            bytes: notify.bytes,
        });
    }
}
