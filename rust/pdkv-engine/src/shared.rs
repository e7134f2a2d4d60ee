//! What the handles, the progress thread and the movers of one engine share.
//!
//! The protocol's decisions are made by one `Node` behind one lock. Whoever has news for it takes
//! the lock, tells it, and carries out what it answers: messages leave in the order in which they
//! were decided, because they are sent under the lock; bytes are never moved under it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use mio::Waker;
use pdkv_core::id::{ExportId, Incarnation, PeerKey, SessionToken, TransferId};
use pdkv_core::node::{Action, Node};
use pdkv_core::plan::{PageWalk, WireOrder};
use pdkv_core::reference::{ExportKind, Reference};
use pdkv_core::wire::{Goodbye, Grant, Message};
use pdkv_core::{Error, ErrorKind, Result};

use crate::channel::Channel;
use crate::clock::{Clock, Flag};
use crate::completion::Completions;
use crate::config::EngineConfig;
use crate::export::ExportWatch;
use crate::inbox::Inbox;
use crate::link::PeerLink;
use crate::mover::Movers;
use crate::pull::PendingMove;
use crate::raw::Raw;
use crate::reader::Reader;
use crate::registry::Registry;
use crate::transfer::TransferCore;
use crate::transport::Work;
use crate::transport::tcp::{Serving, Servings, Socket, Streams, serve};

/// How often a lost peer's process is looked at, while it may still write into our memory.
const SUSPECT_WATCH: Duration = Duration::from_millis(100);

pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) config: EngineConfig,
    pub(crate) clock: Clock,
    pub(crate) address: Option<String>,
    pub(crate) local_name: Option<String>,
    /// Who can read this from outside may read the process; see `HostFacts::probe`.
    pub(crate) probe: Box<[u8; 32]>,
    pub(crate) registry: Registry,
    pub(crate) movers: Arc<Movers>,
    pub(crate) servings: Servings,
    pub(crate) completions: Completions,
    pub(crate) waker: Waker,
    /// Connections made by callers, on their way to the progress thread.
    pub(crate) arrivals: Mutex<Vec<Arc<Reader>>>,
    pub(crate) closed: AtomicBool,
    /// The progress thread has let go of its listeners.
    pub(crate) stopped: Flag,
    state: Mutex<State>,
    /// When the progress thread will wake by itself, in nanoseconds of the engine's clock.
    armed: AtomicU64,
    pub(crate) inbox: Inbox,
    streams: Streams,
    next_peer: AtomicU64,
    next_consumer: AtomicU64,
}

pub(crate) struct State {
    pub(crate) node: Node,
    pub(crate) peers: BTreeMap<PeerKey, PeerEntry>,
    transfers: BTreeMap<TransferId, Entry>,
    pub(crate) exports: BTreeMap<ExportId, Weak<ExportWatch>>,
    pub(crate) raw: Raw,
}

/// One connected peer.
pub(crate) struct PeerEntry {
    pub(crate) channel: Channel,
    pub(crate) name: String,
    /// What data streams must present; for accepted peers.
    pub(crate) token: Option<SessionToken>,
    /// Our way into the peer; for peers we connected to.
    pub(crate) link: Option<Arc<PeerLink>>,
    /// The receiving half of the channel.
    pub(crate) reader: Arc<Reader>,
    /// The process at the other end, when it is one of this host.
    pub(crate) process: Option<Arc<pdkv_device::Process>>,
}

impl PeerEntry {
    /// Sends a message; what the socket doesn't take now goes out when it does.
    pub(crate) fn send(&mut self, message: &Message) -> Result<()> {
        self.channel.send(message)?;
        if self.channel.is_blocked() {
            self.reader.watch_writable();
        }
        Ok(())
    }
}

struct Entry {
    core: Arc<TransferCore>,
    pending: Option<PendingMove>,
}

/// What has to wait until the lock is released.
#[derive(Default)]
struct Later {
    moves: Vec<(PendingMove, Arc<TransferCore>, Grant)>,
    lost: Vec<(PeerKey, Error)>,
    adverts: Vec<(Arc<PeerLink>, pdkv_core::wire::Advertise)>,
    streams_of: Vec<PeerKey>,
}

/// Everything `Shared` is made of that the engine decides at start.
pub(crate) struct Parts {
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) config: EngineConfig,
    pub(crate) clock: Clock,
    pub(crate) address: Option<String>,
    pub(crate) local_name: Option<String>,
    pub(crate) probe: Box<[u8; 32]>,
    pub(crate) movers: Arc<Movers>,
    pub(crate) waker: Waker,
    pub(crate) node: Node,
}

impl Shared {
    pub(crate) fn new(parts: Parts) -> Self {
        Self {
            name: parts.name,
            incarnation: parts.incarnation,
            config: parts.config,
            clock: parts.clock,
            address: parts.address,
            local_name: parts.local_name,
            probe: parts.probe,
            registry: Registry::default(),
            movers: parts.movers,
            servings: Servings::default(),
            completions: Completions::default(),
            waker: parts.waker,
            arrivals: Mutex::default(),
            closed: AtomicBool::new(false),
            stopped: Flag::default(),
            state: Mutex::new(State {
                node: parts.node,
                peers: BTreeMap::new(),
                transfers: BTreeMap::new(),
                exports: BTreeMap::new(),
                raw: Raw::default(),
            }),
            armed: AtomicU64::new(u64::MAX),
            inbox: Inbox::default(),
            streams: Streams::default(),
            next_peer: AtomicU64::new(1),
            next_consumer: AtomicU64::new(1),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// The connection to the engine that made a reference.
    ///
    /// # Errors
    /// `ReferenceRestarted` when another life of it is connected, `PeerUnreachable` when none is.
    pub(crate) fn link_for(&self, reference: &Reference) -> Result<Arc<PeerLink>> {
        let state = self.lock();
        let links = || state.peers.values().filter_map(|entry| entry.link.as_ref());
        if let Some(link) = links().find(|link| link.remote.incarnation == reference.incarnation) {
            return Ok(Arc::clone(link));
        }
        let namesake = links().find(|link| link.address == reference.address || link.remote.name == reference.engine);
        Err(match namesake {
            Some(link) => Error::new(
                ErrorKind::ReferenceRestarted,
                "pull",
                format!(
                    "the reference was made by incarnation `{}` of `{}`, connected is incarnation `{}`",
                    reference.incarnation, reference.engine, link.remote.incarnation
                ),
            )
            .with_hint("the owner restarted since; its blocks are gone"),
            None => Error::new(
                ErrorKind::PeerUnreachable,
                "pull",
                format!("this engine isn't connected to `{}`", reference.engine),
            )
            .with_hint(format!("call connect(`{}`) first", reference.address)),
        })
    }

    pub(crate) fn check_open(&self, operation: &'static str) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(
                ErrorKind::Closed,
                operation,
                format!("engine `{}` is closed", self.name),
            ));
        }
        Ok(())
    }

    pub(crate) fn new_peer_key(&self) -> PeerKey {
        PeerKey(self.next_peer.fetch_add(1, Ordering::Relaxed))
    }

    /// Tells the node something and carries out what it decides.
    pub(crate) fn drive<T>(self: &Arc<Self>, tell: impl FnOnce(&mut State, Duration) -> T) -> T {
        let mut later = Later::default();
        let result = {
            let mut state = self.lock();
            let result = tell(&mut state, self.clock.now());
            self.settle(&mut state, &mut later);
            result
        };
        self.carry_out(later);
        result
    }

    /// Starts a transfer: the entry must exist before the node's first action about it.
    pub(crate) fn begin(
        self: &Arc<Self>,
        peer: PeerKey,
        core: &Arc<TransferCore>,
        begin: impl FnOnce(&mut Node, Duration) -> Result<TransferId>,
        pending: PendingMove,
    ) -> Result<()> {
        self.drive(|state, now| {
            let id = begin(&mut state.node, now)?;
            core.set_id(id);
            if let Some(entry) = state.peers.get(&peer) {
                core.set_reader(&entry.reader);
            }
            state.transfers.insert(
                id,
                Entry {
                    core: Arc::clone(core),
                    pending: Some(pending),
                },
            );
            Ok(())
        })
    }

    fn settle(&self, state: &mut State, later: &mut Later) {
        while let Some(action) = state.node.poll_action() {
            self.act(state, action, later);
        }
        // The progress thread must not oversleep a deadline that has just come up.
        if let Some(deadline) = self.next_deadline(state) {
            let nanos = u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX);
            if nanos < self.armed.load(Ordering::Acquire) {
                self.armed.store(nanos, Ordering::Release);
                let _ = self.waker.wake();
            }
        }
    }

    fn next_deadline(&self, state: &State) -> Option<Duration> {
        let watching = (!state.raw.suspects.is_empty()).then(|| self.clock.now() + SUSPECT_WATCH);
        let timers = state.node.next_deadline().into_iter().chain(state.raw.next_deadline());
        timers.chain(watching).min()
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
                if let Some(entry) = state.transfers.get(&transfer) {
                    entry.core.finish(outcome);
                    self.completions.push(transfer);
                }
            }
            Action::Quiesced { transfer } => {
                if let Some(entry) = state.transfers.remove(&transfer) {
                    entry.core.set_quiesced();
                }
            }
            Action::ExportChanged { export, state: now } => {
                if let Some(watch) = state.exports.get(&export).and_then(Weak::upgrade) {
                    watch.set(now);
                }
                if now.is_quiesced() {
                    state.exports.remove(&export);
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
                    link.remote.withdraw(&withdraw.regions, &withdraw.caches);
                }
            }
            Action::Renewed { request, result, .. } => state.raw.renewed(request, result),
            Action::Close { peer, error } => self.close_peer(state, peer, &error, later),
            Action::ServeStop { peer, transfer } => self.servings.end(peer, transfer),
        }
    }

    fn carry_out(self: &Arc<Self>, later: Later) {
        for (pending, core, grant) in later.moves {
            pending.start(self, &core, grant);
        }
        for (link, advertise) in later.adverts {
            link.learn(self, &advertise);
        }
        for peer in later.streams_of {
            self.streams.shut_down(peer);
        }
        for (peer, error) in later.lost {
            self.peer_lost(peer, &error);
        }
    }

    /// The channel broke or fell silent: everything with this peer ends now.
    pub(crate) fn peer_lost(self: &Arc<Self>, peer: PeerKey, error: &Error) {
        let mut later = Later::default();
        {
            let mut state = self.lock();
            if !state.peers.contains_key(&peer) {
                return;
            }
            let now = self.clock.now();
            state.node.peer_down(now, peer, error);
            self.settle(&mut state, &mut later);
            self.close_peer(&mut state, peer, error, &mut later);
            self.settle(&mut state, &mut later);
        }
        self.carry_out(later);
    }

    /// Ends a connection in order: the peer is told before the channel closes.
    pub(crate) fn hang_up(self: &Arc<Self>, peer: PeerKey, error: &Error) {
        if let Some(entry) = self.lock().peers.get_mut(&peer) {
            let goodbye = Message::Goodbye(Goodbye {
                reason: error.message().to_owned(),
            });
            // A channel that is broken already needs no farewell.
            let _ = entry.send(&goodbye);
        }
        self.peer_lost(peer, error);
    }

    fn close_peer(&self, state: &mut State, peer: PeerKey, error: &Error, later: &mut Later) {
        let Some(entry) = state.peers.remove(&peer) else { return };
        tracing::debug!(peer = %entry.name, %error, "peer closed");
        entry.channel.shut_down();
        if let Some(link) = &entry.link {
            link.die(error);
        }
        state.raw.peer_lost(peer, error);
        // A writer of this host is known to be out of our memory once its process is gone; one that
        // came over a stream, once the stream is shut.
        match entry.process {
            Some(process) if state.node.may_write(peer) && process.alive() => {
                state.raw.suspects.push((peer, process));
            }
            _ => state.node.writer_dead(self.clock.now(), peer),
        }
        later.streams_of.push(peer);
    }

    /// The movers are out of a transfer's memory.
    pub(crate) fn moved(self: &Arc<Self>, work: &Arc<Work>, result: Result<u64>) {
        let id = work.id();
        self.moved_id(id, &work.core, result);
    }

    pub(crate) fn moved_id(self: &Arc<Self>, id: TransferId, core: &Arc<TransferCore>, result: Result<u64>) {
        if Raw::owns(id) {
            self.drive(|state, _| crate::raw::finish(self, state, id, core, result));
        } else {
            self.drive(|state, now| state.node.moved(now, id, result));
        }
    }

    pub(crate) fn cancel(self: &Arc<Self>, id: TransferId) {
        self.drive(|state, now| {
            if Raw::owns(id) {
                state.raw.cancel(id);
            } else {
                state.node.cancel(now, id);
            }
        });
    }

    /// Runs the timers; says when to come again.
    pub(crate) fn tick(self: &Arc<Self>) -> Option<Duration> {
        // Awake already: while this runs, nobody needs to wake the progress thread, itself least of all.
        // What comes up meanwhile comes up under the lock that is taken again below.
        self.armed.store(0, Ordering::Release);
        self.drive(|state, now| {
            state.node.tick(now);
            state.raw.tick(now);
            let (gone, alive) = std::mem::take(&mut state.raw.suspects)
                .into_iter()
                .filter(|&(peer, _)| state.node.may_write(peer))
                .partition(|(_, p)| !p.alive());
            state.raw.suspects = alive;
            let gone: Vec<(PeerKey, _)> = gone;
            for (peer, _) in gone {
                state.node.writer_dead(now, peer);
            }
        });
        let state = self.lock();
        let deadline = self.next_deadline(&state);
        self.armed
            .store(deadline.map_or(u64::MAX, |at| at.as_nanos() as u64), Ordering::Release);
        deadline.map(|at| at.saturating_sub(self.clock.now()))
    }

    /// Sends a message to every peer.
    pub(crate) fn tell_all(self: &Arc<Self>, message: &Message) {
        let mut later = Later::default();
        for (&peer, entry) in &mut self.lock().peers {
            if let Err(error) = entry.send(message) {
                later.lost.push((peer, error));
            }
        }
        self.carry_out(later);
    }

    pub(crate) fn next_consumer(&self) -> u64 {
        self.next_consumer.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn peer_of_token(&self, token: SessionToken) -> Option<PeerKey> {
        let state = self.lock();
        state
            .peers
            .iter()
            .find(|(_, entry)| entry.token == Some(token))
            .map(|(&key, _)| key)
    }

    /// Serves a data stream of the peer on a thread of its own.
    pub(crate) fn serve_stream(self: &Arc<Self>, peer: PeerKey, socket: Socket) -> Result<()> {
        let socket = self.streams.enter(peer, socket);
        // The peer may have been lost since its token was looked up; then nobody would shut this.
        if !self.lock().peers.contains_key(&peer) {
            socket.shut_down();
        }
        let shared = Arc::clone(self);
        crate::mover::spawn("pdkv-serve", move || serve(&shared, peer, &socket))
    }

    /// A granted claim in the form in which streams serve it.
    pub(crate) fn serving(&self, peer: PeerKey, transfer: TransferId) -> Result<Serving> {
        let view = {
            let state = self.lock();
            let view = state.node.claim_view(peer, transfer);
            view.filter(|view| !view.revoked)
                .ok_or_else(|| state.node.why_ended(peer, transfer))?
        };
        let cache = self.registry.cache(view.cache)?;
        let order = view.order.unwrap_or_else(|| WireOrder::natural(&cache.layout));
        let walk = match view.kind {
            ExportKind::Export => PageWalk::new(&cache.layout, &view.blocks, &view.selection, order),
            ExportKind::Offer => PageWalk::scatter(&cache.layout, &view.blocks, &view.selection, order),
        }?;
        Ok(Serving {
            kind: view.kind,
            walk,
            regions: cache.memory.clone(),
            ended: AtomicBool::new(false),
        })
    }
}
