//! What the node decides, carried out: messages leave and states change under the lock, the rest waits
//! until it is released.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use pdkv_core::Error;
use pdkv_core::id::PeerKey;
use pdkv_core::node::Action;
use pdkv_core::wire::{Advertise, Grant, Message};

use crate::clock::nanos;
use crate::link::PeerLink;
use crate::pull::PendingMove;
use crate::remains::Remains;
use crate::shared::{Shared, State};
use crate::transfer::TransferCore;

/// What has to wait until the lock is released.
#[derive(Default)]
pub(crate) struct Later {
    moves: Vec<(PendingMove, Arc<TransferCore>, Grant)>,
    lost: Vec<(PeerKey, Error)>,
    adverts: Vec<(Arc<PeerLink>, Advertise)>,
    closed: Vec<(PeerKey, Error)>,
    /// What was held by what ended, with memory perhaps.
    remains: Remains,
}

impl Shared {
    /// Does everything that the node wants done now.
    pub(crate) fn settle(&self, state: &mut State, later: &mut Later) {
        while let Some(action) = state.node.poll_action() {
            self.act(state, action, later);
        }
        // The progress thread must not oversleep a deadline that has just come up.
        if let Some(deadline) = self.next_deadline(state) {
            self.wake_by(nanos(deadline));
        }
    }

    /// Has the progress thread wake by then. The caller holds the lock of the state.
    pub(crate) fn wake_by(&self, nanos: u64) {
        if nanos < self.armed.load(Ordering::Acquire) {
            self.armed.store(nanos, Ordering::Release);
            let _ = self.waker.wake();
        }
    }

    fn act(&self, state: &mut State, action: Action, later: &mut Later) {
        match action {
            Action::Send { peer, message } => {
                if let Some(entry) = state.peers.get_mut(&peer)
                    && let Err(error) = entry.send(&message)
                {
                    later.lost.push((peer, error));
                }
            }
            Action::Move { transfer, grant, .. } => {
                if let Some(entry) = state.transfers.get_mut(&transfer)
                    && let Some(pending) = entry.pending.take()
                {
                    later.moves.push((pending, Arc::clone(&entry.core), grant));
                }
            }
            Action::Stop { transfer } => {
                if let Some(entry) = state.transfers.get(&transfer) {
                    entry.core.stop.store(true, Ordering::Release);
                }
            }
            Action::Finished { transfer, outcome } => {
                if let Some(entry) = state.transfers.get(&transfer)
                    && entry.core.finish(outcome)
                {
                    self.completions.push(transfer);
                }
            }
            Action::Quiesced { transfer } => {
                if let Some(entry) = state.transfers.remove(&transfer) {
                    entry.core.set_quiesced();
                    if let Some(pending) = entry.pending {
                        pending.bequeath(&mut later.remains);
                    }
                }
            }
            Action::ExportChanged { export, state: now } => {
                let watch = state.exports.get(&export).and_then(Weak::upgrade);
                if now.is_quiesced() {
                    state.exports.remove(&export);
                    // First: who has waited for the end finds it in the list.
                    self.ended.push(export);
                }
                if let Some(watch) = watch {
                    watch.set(now);
                }
            }
            Action::Notified { name, bytes, .. } => self.inbox.deliver(name, bytes),
            Action::Advertised { peer, advertise } => {
                if let Some(link) = state.peers.get(&peer).and_then(|entry| entry.link.clone()) {
                    later.adverts.push((link, advertise));
                }
            }
            Action::Withdrawn { peer, withdraw } => {
                if let Some(link) = state.peers.get(&peer).and_then(|entry| entry.link.as_ref()) {
                    let regions = link.remote.withdraw(&withdraw.regions, &withdraw.caches);
                    later.remains.add_all(regions);
                }
            }
            Action::Renewed { request, result, .. } => state.raw.renewed(request, result),
            Action::Close { peer, error } => self.close_peer(state, peer, &error, later),
            Action::ServeStop { peer, transfer } => self.servings.end(peer, transfer, &mut later.remains),
        }
    }

    /// Does what had to wait for the lock.
    pub(crate) fn carry_out(self: &Arc<Self>, later: Later) {
        for (pending, core, grant) in later.moves {
            pending.start(self, &core, grant);
        }
        for (link, advertise) in later.adverts {
            link.learn(self, &advertise);
        }
        for (peer, error) in later.closed {
            self.streams.shut_down(peer);
            self.lanes.end(peer);
            self.pipes.end(peer, &error);
        }
        later.remains.bury(&self.movers);
        for (peer, error) in later.lost {
            self.peer_lost(peer, &error);
        }
    }

    /// The node has forgotten the peer; now its channel, our ways into it and its streams end.
    pub(crate) fn close_peer(&self, state: &mut State, peer: PeerKey, error: &Error, later: &mut Later) {
        let Some(entry) = state.peers.remove(&peer) else { return };
        tracing::debug!(peer = %entry.name, %error, "peer closed");
        entry.channel.shut_down();
        if let Some(link) = &entry.link {
            later.remains.add_all(link.die(error));
        }
        state.raw.peer_lost(peer, error, &self.completions);
        if entry.writers.is_empty() || state.node.writers_of(peer).is_empty() {
            // Whoever came over a stream is out once the stream is shut.
            state.node.writer_dead(self.clock.now(), peer);
        } else {
            state.suspects.add(peer, entry.writers);
        }
        later.closed.push((peer, error.clone()));
    }
}

impl State {
    /// Sends a message to every peer.
    pub(crate) fn tell_all(&mut self, message: &Message, later: &mut Later) {
        for (&peer, entry) in &mut self.peers {
            if let Err(error) = entry.send(message) {
                later.lost.push((peer, error));
            }
        }
    }
}
