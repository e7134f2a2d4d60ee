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
use pdkv_core::lane::Carrier;
use pdkv_core::node::Node;
use pdkv_core::reference::Reference;
use pdkv_core::wire::{Advertise, Goodbye, Message, Withdraw};
use pdkv_core::{Error, ErrorKind, Result};

use crate::actions::Later;
use crate::channel::Channel;
use crate::clock::{Clock, Flag, nanos};
use crate::closing::Ending;
use crate::completion::Watchers;
use crate::config::EngineConfig;
use crate::ended::EndedExports;
use crate::export::ExportWatch;
use crate::inbox::Inbox;
use crate::link::PeerLink;
use crate::mover::Movers;
use crate::pipe::Pipes;
use crate::pull::PendingMove;
use crate::raw::Raw;
use crate::reader::Reader;
use crate::registry::Registry;
use crate::suspect::{self, Suspects, Writer};
use crate::transfer::TransferCore;
use crate::transport::Work;
use crate::transport::gpu::Gpus;
use crate::transport::serving::Servings;
use crate::transport::tcp::{Stagings, Streams};
use crate::transport::ucx::{Control, Lanes, Runtime};

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
    pub(crate) completions: Watchers,
    pub(crate) ended: EndedExports,
    pub(crate) waker: Waker,
    /// Connections made by callers, on their way to the progress thread.
    pub(crate) arrivals: Mutex<Vec<Arc<Reader>>>,
    /// Calls are refused.
    pub(crate) closed: AtomicBool,
    /// How far that has come.
    pub(crate) ending: Ending,
    /// Threads end: set after `closed`, once the peers are told.
    pub(crate) halted: AtomicBool,
    /// The progress thread has let go of its listeners.
    pub(crate) stopped: Flag,
    state: Mutex<State>,
    /// When the progress thread will wake by itself, in nanoseconds of the engine's clock.
    pub(crate) armed: AtomicU64,
    pub(crate) inbox: Inbox,
    pub(crate) streams: Streams,
    pub(crate) stagings: Arc<Stagings>,
    /// UCX, as far as this engine has loaded it.
    pub(crate) ucx: Runtime,
    pub(crate) lanes: Lanes,
    /// GPUs, as far as this engine has used them.
    pub(crate) gpus: Gpus,
    pub(crate) pipes: Pipes,
    next_peer: AtomicU64,
    next_consumer: AtomicU64,
    /// The process that started it. A forked child has none of the threads, may have locks that nobody
    /// opens again, and shares the connections: it must neither use it, nor close it, nor say goodbye.
    process: u32,
}

pub(crate) struct State {
    pub(crate) node: Node,
    pub(crate) peers: BTreeMap<PeerKey, PeerEntry>,
    pub(crate) transfers: BTreeMap<TransferId, Entry>,
    pub(crate) exports: BTreeMap<ExportId, Weak<ExportWatch>>,
    pub(crate) raw: Raw,
    pub(crate) suspects: Suspects,
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
    /// Who may write into our memory behind our back; for accepted peers.
    pub(crate) writers: Vec<Writer>,
    /// Whether it says that it runs on this host; for accepted peers.
    pub(crate) same_host: bool,
    /// What both ends can do.
    pub(crate) features: u64,
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

/// A transfer of ours that is not quiesced.
pub(crate) struct Entry {
    pub(crate) core: Arc<TransferCore>,
    pub(crate) pending: Option<PendingMove>,
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
        let stagings = Arc::new(Stagings::new(&parts.config));
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
            completions: Watchers::default(),
            ended: EndedExports::default(),
            waker: parts.waker,
            arrivals: Mutex::default(),
            closed: AtomicBool::new(false),
            ending: Ending::default(),
            halted: AtomicBool::new(false),
            stopped: Flag::default(),
            state: Mutex::new(State {
                node: parts.node,
                peers: BTreeMap::new(),
                transfers: BTreeMap::new(),
                exports: BTreeMap::new(),
                raw: Raw::default(),
                suspects: Suspects::default(),
            }),
            armed: AtomicU64::new(u64::MAX),
            inbox: Inbox::default(),
            streams: Streams::default(),
            stagings,
            ucx: Runtime::default(),
            lanes: Lanes::default(),
            gpus: Gpus::default(),
            pipes: Pipes::default(),
            next_peer: AtomicU64::new(1),
            next_consumer: AtomicU64::new(1),
            process: std::process::id(),
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
        self.check_process("find the peer")?;
        let state = self.lock();
        let links = || state.peers.values().filter_map(|entry| entry.link.as_ref());
        // Of several the newest: who connected again had a reason to.
        let ours = links().filter(|link| link.remote.incarnation == reference.incarnation);
        if let Some(link) = ours.max_by_key(|link| link.key) {
            return Ok(Arc::clone(link));
        }
        let namesake = links().find(|link| link.address == reference.address || link.remote.name == reference.engine);
        Err(match namesake {
            Some(link) => Error::new(
                ErrorKind::ReferenceRestarted,
                "transfer",
                format!(
                    "the reference was made by incarnation `{}` of `{}`, connected is incarnation `{}`",
                    reference.incarnation, reference.engine, link.remote.incarnation
                ),
            )
            .with_hint("the owner restarted since; its blocks are gone"),
            None => Error::new(
                ErrorKind::PeerUnreachable,
                "transfer",
                format!("this engine isn't connected to `{}`", reference.engine),
            )
            .with_hint(format!("call connect(`{}`) first", reference.address)),
        })
    }

    /// Whether this is the process that started the engine, and no fork of it.
    pub(crate) fn at_home(&self) -> bool {
        self.process == std::process::id()
    }

    /// # Errors
    /// `Unsupported` in a forked child, where a call would wait for threads that it hasn't.
    pub(crate) fn check_process(&self, operation: &'static str) -> Result<()> {
        if self.at_home() {
            return Ok(());
        }
        let text = format!(
            "engine `{}` belongs to process `{}`, of which this is a fork: its threads are not here, and its \
             connections can't be used by both",
            self.name, self.process
        );
        Err(Error::new(ErrorKind::Unsupported, operation, text)
            .with_hint("make an engine after the fork, or start workers with `spawn` or `forkserver`"))
    }

    /// # Errors
    /// `Closed`, and `Unsupported` in a forked child.
    pub(crate) fn check_open(&self, operation: &'static str) -> Result<()> {
        self.check_process(operation)?;
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
        // What is refused goes in the caller's thread, and not under the lock.
        let mut pending = Some(pending);
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
                    pending: pending.take(),
                },
            );
            Ok(())
        })
    }

    pub(crate) fn next_deadline(&self, state: &State) -> Option<Duration> {
        let watching = state.suspects.next_look(self.clock.now());
        let timers = state.node.next_deadline().into_iter().chain(state.raw.next_deadline());
        timers.chain(watching).chain(self.pipes.next_chore()).min()
    }

    /// The channel broke or fell silent: everything with this peer ends now.
    pub(crate) fn peer_lost(self: &Arc<Self>, peer: PeerKey, error: &Error) {
        self.part(peer, error, None);
    }

    /// The same; the peer is told first, where that is still possible.
    fn part(self: &Arc<Self>, peer: PeerKey, error: &Error, farewell: Option<&Message>) {
        let mut later = Later::default();
        {
            let mut state = self.lock();
            let Some(entry) = state.peers.get_mut(&peer) else {
                return;
            };
            if let Some(farewell) = farewell {
                // A channel that is broken already needs none. Under the same lock as the end: the peer's answer is to close, which is no news then.
                let _ = entry.send(farewell);
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
        let goodbye = Message::Goodbye(Goodbye {
            reason: error.message().to_owned(),
        });
        self.part(peer, error, Some(&goodbye));
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
        if !self.at_home() {
            return;
        }
        self.drive(|state, now| {
            if Raw::owns(id) {
                state.raw.cancel(id, &self.completions);
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
            state.raw.tick(now, &self.completions);
        });
        crate::suspect::look(self);
        self.pipes.tick(self);
        let state = self.lock();
        let deadline = self.next_deadline(&state);
        self.armed.store(deadline.map_or(u64::MAX, nanos), Ordering::Release);
        deadline.map(|at| at.saturating_sub(self.clock.now()))
    }

    /// Registers something and tells every peer, under the lock under which hellos are answered: a peer
    /// hears of ids in the order in which they are given, and of each of them.
    pub(crate) fn announce<T>(
        self: &Arc<Self>,
        operation: &'static str,
        register: impl FnOnce(&Registry) -> (T, Advertise),
    ) -> Result<T> {
        let mut later = Later::default();
        let made = {
            self.check_process(operation)?;
            let mut state = self.lock();
            self.check_open(operation)?;
            let (made, advertise) = register(&self.registry);
            state.tell_all(&Message::Advertise(advertise), &mut later);
            made
        };
        self.carry_out(later);
        Ok(made)
    }

    /// Registers something for one peer and tells it alone, in the same order.
    pub(crate) fn announce_to<T>(
        self: &Arc<Self>,
        peer: PeerKey,
        operation: &'static str,
        register: impl FnOnce(&Registry) -> (T, Advertise),
    ) -> Result<T> {
        self.check_process(operation)?;
        let mut state = self.lock();
        self.check_open(operation)?;
        let lost = || Error::new(ErrorKind::PeerLost, operation, "the peer was lost meanwhile");
        let entry = state.peers.get_mut(&peer).ok_or_else(lost)?;
        let (made, advertise) = register(&self.registry);
        let told = entry.send(&Message::Advertise(advertise));
        drop(state);
        if let Err(error) = told {
            self.peer_lost(peer, &error);
            return Err(error);
        }
        Ok(made)
    }

    /// Tells one peer that something is registered no more.
    pub(crate) fn withdraw_from(self: &Arc<Self>, peer: PeerKey, withdraw: Withdraw) {
        let mut state = self.lock();
        let told = state
            .peers
            .get_mut(&peer)
            .map(|entry| entry.send(&Message::Withdraw(withdraw)));
        drop(state);
        if let Some(Err(error)) = told {
            self.peer_lost(peer, &error);
        }
    }

    /// Tells every peer that something is registered no more.
    pub(crate) fn withdraw(self: &Arc<Self>, withdraw: Withdraw) {
        let mut later = Later::default();
        self.lock().tell_all(&Message::Withdraw(withdraw), &mut later);
        self.carry_out(later);
    }

    /// Remembers the process that is about to map our memory for an accepted peer, by the number that the kernel gives it, whatever the peer's
    /// hello said; `false` when it can't be watched.
    pub(crate) fn watch_writer(&self, peer: PeerKey, pid: Option<u32>) -> bool {
        let mut state = self.lock();
        let entry = state.peers.get_mut(&peer);
        entry.is_some_and(|entry| suspect::watch(&mut entry.writers, pid))
    }

    /// Remembers a one-sided lane on which an accepted peer may write.
    ///
    /// # Errors
    /// `PeerLost`; `Unsupported` when the end of the lane would not be the end of the peer's writing.
    pub(crate) fn add_lane(&self, peer: PeerKey, lane: &Arc<Control>, carrier: Carrier) -> Result<()> {
        let mut state = self.lock();
        let Some(entry) = state.peers.get_mut(&peer) else {
            return Err(Error::new(ErrorKind::PeerLost, "lane", "the peer was lost meanwhile"));
        };
        let watched = entry.writers.iter().any(|writer| !matches!(writer, Writer::Lane(_)));
        // The kernel copies for whoever asks it, our worker or no.
        if carrier != Carrier::Rdma && entry.same_host && !watched {
            let text = "its process can't be watched by the other side";
            return Err(Error::new(ErrorKind::Unsupported, "lane", text));
        }
        entry.writers.retain(|writer| !writer.is_spent());
        entry.writers.push(Writer::Lane(Arc::clone(lane)));
        Ok(())
    }

    /// Whether any of these transfers of ours is not quiesced.
    pub(crate) fn runs_any(&self, transfers: &[TransferId]) -> bool {
        let state = self.lock();
        transfers.iter().any(|id| state.transfers.contains_key(id))
    }

    /// Whether every transfer of ours is quiesced.
    pub(crate) fn runs_none(&self) -> bool {
        let state = self.lock();
        state.transfers.is_empty() && state.raw.is_idle()
    }

    pub(crate) fn next_consumer(&self) -> u64 {
        self.next_consumer.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn peer_of_token(&self, token: SessionToken) -> Option<PeerKey> {
        let state = self.lock();
        let mut peers = state.peers.iter();
        peers.find(|(_, entry)| entry.token == Some(token)).map(|(&key, _)| key)
    }
}
