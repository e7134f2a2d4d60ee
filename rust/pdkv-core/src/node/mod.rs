//! The protocol engine of one pdkv engine, without I/O: messages and time go in, actions come out.
//!
//! A node keeps exports (`owner`), claims on them (`claims`), what comes before its export (`ahead`), transfers (`initiator`) and liveness (`peers`), and knows every
//! deadline. It owns no socket, no thread and no clock, and touches no cache byte: movers do that,
//! and tell it when they are out of the memory. Every call is total: late, duplicate or unknown
//! messages are counted, and only what no honest peer would send is an error, for which the caller
//! drops the channel.

mod action;
mod ahead;
mod claims;
mod fence;
mod initiator;
mod owner;
mod peers;
mod stats;

use std::collections::{BTreeMap, VecDeque};

pub use action::Action;
pub use claims::ClaimView;
pub use peers::{RemotePeer, Role};
pub use stats::NodeStats;

pub use crate::config::NodeConfig;
pub use crate::export::{ExportSpec, ExportState};
pub use crate::lease::Now;
pub use crate::transfer::{Destination, Outcome, TransferSpec, TransferState};

use crate::error::{Error, ErrorKind, Result};
use crate::export::{Export, Tombstones};
use crate::id::{ExportId, Incarnation, PeerKey, TransferId};
use crate::lease::Deadlines;
use crate::wire::{Message, violation};

/// Who this engine is.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Name of the engine.
    pub name: String,
    /// Its life.
    pub incarnation: Incarnation,
    /// Address where it accepts connections; empty if it doesn't.
    pub address: String,
    /// Random key of this life, for the tags of its references.
    pub mac_key: [u8; 32],
}

/// Everything that can run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Lease(ExportId),
    Claim(PeerKey, TransferId),
    Parked(PeerKey, TransferId),
    Declined(ExportId),
    RevokeAgain(PeerKey, TransferId),
    Transfer(TransferId),
    FenceAgain(TransferId),
    Heartbeat(PeerKey),
    Silence(PeerKey),
    Renewal(u64),
}

/// The protocol engine. See the module's documentation.
#[derive(Debug)]
pub struct Node {
    config: NodeConfig,
    identity: Identity,
    peers: BTreeMap<PeerKey, peers::Peer>,
    exports: BTreeMap<ExportId, Export>,
    tombstones: Tombstones,
    claims: BTreeMap<(PeerKey, TransferId), claims::ClaimRecord>,
    ahead: ahead::Ahead,
    transfers: BTreeMap<TransferId, initiator::Transfer>,
    renewals: BTreeMap<u64, PeerKey>,
    /// Writers of ours that are out of an owner's memory and could not say so: their channel was gone.
    unreported: BTreeMap<TransferId, Incarnation>,
    next_transfer: u64,
    next_request: u64,
    timers: Deadlines<Timer>,
    actions: VecDeque<Action>,
    stats: NodeStats,
}

impl Node {
    /// A node without peers.
    pub fn new(config: NodeConfig, identity: Identity) -> Self {
        Self {
            tombstones: Tombstones::new(config.max_tombstones),
            config,
            identity,
            peers: BTreeMap::new(),
            exports: BTreeMap::new(),
            claims: BTreeMap::new(),
            ahead: ahead::Ahead::default(),
            transfers: BTreeMap::new(),
            renewals: BTreeMap::new(),
            unreported: BTreeMap::new(),
            next_transfer: 1,
            next_request: 1,
            timers: Deadlines::default(),
            actions: VecDeque::new(),
            stats: NodeStats::default(),
        }
    }

    /// The configuration.
    pub fn config(&self) -> &NodeConfig {
        &self.config
    }

    /// Who this engine is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Changes the address that new references carry, once the listener is bound.
    pub fn set_address(&mut self, address: impl Into<String>) {
        self.identity.address = address.into();
    }

    /// What happened so far.
    pub fn stats(&self) -> NodeStats {
        self.stats
    }

    /// Exports and offers whose blocks are still pinned.
    pub fn live_exports(&self) -> usize {
        self.exports.len()
    }

    /// Claims that peers hold on our exports.
    pub fn live_claims(&self) -> usize {
        self.claims.len()
    }

    /// Transfers of ours that are not quiesced.
    pub fn live_transfers(&self) -> usize {
        self.transfers.len()
    }

    /// The next thing to do.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When [`tick`](Self::tick) has work, if nothing else happens.
    pub fn next_deadline(&self) -> Option<Now> {
        self.timers.next()
    }

    /// Handles everything that is due. After a pause of the whole process, hand over what the
    /// sockets hold before ticking, or living peers look silent.
    pub fn tick(&mut self, now: Now) {
        while let Some(timer) = self.timers.pop_due(now) {
            match timer {
                Timer::Lease(export) => self.lease_over(export),
                Timer::Claim(peer, transfer) => self.claim_over(now, peer, transfer),
                Timer::Parked(peer, transfer) => self.park_over(peer, transfer),
                Timer::Declined(export) => self.declines_over(export),
                Timer::RevokeAgain(peer, transfer) => self.revoke_again(now, peer, transfer),
                Timer::Transfer(transfer) => self.transfer_over(now, transfer),
                Timer::FenceAgain(transfer) => self.fence_again(now, transfer),
                Timer::Heartbeat(peer) => self.heartbeat(now, peer),
                Timer::Silence(peer) => self.silence(now, peer),
                Timer::Renewal(request) => self.renewal_over(request),
            }
        }
    }

    /// Handles one message that came in over the channel of `peer`, in order.
    ///
    /// # Errors
    /// `Handshake` when no honest peer would have sent it; drop the channel, which ends with
    /// [`peer_down`](Self::peer_down).
    pub fn handle(&mut self, now: Now, peer: PeerKey, message: Message) -> Result<()> {
        let Some(role) = self.heard_from(now, peer) else {
            self.stats.messages_after_down += 1;
            return Ok(());
        };
        match message {
            Message::Ping(ping) => self.on_ping(peer, ping),
            Message::Pong(_) => {}
            Message::Goodbye(goodbye) => self.on_goodbye(now, peer, &goodbye),
            Message::Advertise(advertise) => self.actions.push_back(Action::Advertised { peer, advertise }),
            Message::Withdraw(withdraw) => self.actions.push_back(Action::Withdrawn { peer, withdraw }),
            Message::Notify(notify) => self.on_notify(peer, notify),
            Message::Unknown(unknown) if unknown.critical => {
                return Err(violation("peer sent a message that this release must not ignore")
                    .with_hint("use the same pdkv release on both sides"));
            }
            Message::Unknown(_) => self.stats.unknown_messages += 1,
            message => match role {
                Role::Owner => return self.handle_as_owner(now, peer, message),
                Role::Initiator => return self.handle_as_initiator(now, peer, message),
            },
        }
        Ok(())
    }

    fn send(&mut self, peer: PeerKey, message: Message) {
        if self.peers.contains_key(&peer) {
            self.actions.push_back(Action::Send { peer, message });
        }
    }

    fn no_peer(&self, operation: &'static str, peer: PeerKey) -> Error {
        let text = format!("no channel `{peer}` of engine `{}` is open", self.identity.name);
        Error::new(ErrorKind::PeerLost, operation, text)
    }
}

fn misplaced(message: &Message) -> Error {
    violation(format!(
        "peer sent `{}`, which its side of the channel must not send",
        message.name()
    ))
}
