//! The engine: what a process opens once and everything else hangs from.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use mio::net::TcpListener;
use mio::{Poll, Waker};
use pdkv_core::config::NodeConfig;
use pdkv_core::digest::fingerprint;
use pdkv_core::id::{ExportId, Incarnation, RegionId};
use pdkv_core::layout::KvLayout;
use pdkv_core::node::{Identity, Node};
use pdkv_core::reference::Reference;
use pdkv_core::shard::Shard;
use pdkv_core::wire::{Advertise, Withdraw};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Memory;
use pdkv_device::cuda::Witnesses;

use crate::cache::KvCache;
use crate::clock::Clock;
use crate::closing::{CLOSE_WAIT, close};
use crate::completion::Completions;
use crate::config::EngineConfig;
use crate::connect::{fresh_incarnation, no_random};
use crate::mover::Movers;
use crate::peer::Peer;
use crate::pipe::PipeReceiver;
use crate::reactor::{Reactor, WAKE};
use crate::registry::{LocalCache, LocalRegion, Offered};
use crate::shared::{Parts, Shared};
use crate::stats::EngineStats;

/// Longest name of an engine.
const MAX_NAME: usize = 200;

/// The engines of this process, for peers that live in it too.
static NEIGHBOURS: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// The engine of this process with that life, if there is one.
pub(crate) fn inproc_engine(incarnation: Incarnation) -> Option<Weak<Shared>> {
    let mut list = NEIGHBOURS.lock().unwrap_or_else(PoisonError::into_inner);
    list.retain(|engine| engine.strong_count() > 0);
    list.iter()
        .find(|engine| engine.upgrade().is_some_and(|e| e.incarnation == incarnation))
        .cloned()
}

/// Those that are not dropped yet.
pub(crate) fn engines() -> Vec<Arc<Shared>> {
    let list = NEIGHBOURS.lock().unwrap_or_else(PoisonError::into_inner);
    list.iter().filter_map(Weak::upgrade).collect()
}

/// One transfer engine. Cloning gives another handle on the same one; it closes when the last
/// handle is dropped or at [`close`](Self::close).
#[derive(Clone)]
pub struct Engine {
    owner: Arc<Owner>,
}

struct Owner {
    shared: Arc<Shared>,
}

impl Owner {
    fn close(&self, patience: Duration) -> bool {
        self.shared.at_home() && close(&self.shared, patience)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Whoever drops the last handle may hold locks of its own, the interpreter's for one.
        self.close(Duration::ZERO);
    }
}

impl Engine {
    /// Starts an engine: listens, and starts its threads.
    ///
    /// # Errors
    /// `Config` for bad settings or an address that can't be bound, `Capacity` when the system gives
    /// no more threads or descriptors.
    pub fn new(name: &str, config: EngineConfig) -> Result<Self> {
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(Error::new(
                ErrorKind::Config,
                "start",
                format!("the engine's name has `{}` bytes", name.len()),
            )
            .with_hint(format!("choose 1 to {MAX_NAME}")));
        }
        config.validate()?;
        let listener = config.listen_address()?.map(listen).transpose()?;
        let address = match &listener {
            Some(listener) => Some(listener.local_addr().map_err(start)?.to_string()),
            None => None,
        };
        let local = crate::local::listen();
        let poll = Poll::new().map_err(start)?;
        let waker = Waker::new(poll.registry(), WAKE).map_err(start)?;
        let incarnation = fresh_incarnation()?;
        let mut mac_key = [0; 32];
        getrandom::fill(&mut mac_key).map_err(no_random)?;
        let mut probe = Box::new([0; 32]);
        getrandom::fill(&mut *probe).map_err(no_random)?;
        let node_config = NodeConfig {
            heartbeat: config.heartbeat,
            peer_timeout: config.peer_timeout,
            max_claim: config.max_claim,
            ..NodeConfig::default()
        };
        node_config.validate()?;
        let identity = Identity {
            name: name.to_owned(),
            incarnation,
            address: address.clone().unwrap_or_default(),
            mac_key,
        };
        let shared = Arc::new(Shared::new(Parts {
            name: name.to_owned(),
            incarnation,
            clock: Clock::start(),
            address,
            local_name: local.as_ref().map(|(_, name)| name.clone()),
            probe,
            movers: Arc::new(Movers::start(name, config.threads)?),
            waker,
            node: Node::new(node_config, identity),
            config,
        }));
        let reactor = Reactor::new(Arc::clone(&shared), poll, listener, local.map(|(listener, _)| listener))?;
        crate::mover::spawn("pdkv-progress", move || reactor.run())?;
        NEIGHBOURS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::downgrade(&shared));
        Ok(Self {
            owner: Arc::new(Owner { shared }),
        })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.owner.shared
    }

    /// The engine's name.
    pub fn name(&self) -> &str {
        &self.shared().name
    }

    /// This life of the engine.
    pub fn incarnation(&self) -> Incarnation {
        self.shared().incarnation
    }

    /// Where peers can connect, `host:port`; `None` when it doesn't listen.
    pub fn address(&self) -> Option<&str> {
        self.shared().address.as_deref()
    }

    /// The settings it runs with.
    pub fn config(&self) -> &EngineConfig {
        &self.shared().config
    }

    /// Whether [`close`](Self::close) was called.
    pub fn closed(&self) -> bool {
        self.shared().closed.load(Ordering::Acquire)
    }

    /// Registers memory for raw one-sided operations of this engine and, with `raw_access`, of
    /// connected peers too.
    ///
    /// # Errors
    /// `Closed`.
    pub fn register(&self, memory: impl Into<Memory>, name: Option<&str>, raw_access: bool) -> Result<Region> {
        let offered = Offered::from(memory.into());
        let local = self.shared().announce("register", |registry| {
            let local = registry.add_region(name.unwrap_or_default().to_owned(), offered, raw_access);
            let regions = vec![local.advert()];
            (
                local,
                Advertise {
                    regions,
                    caches: Vec::new(),
                },
            )
        })?;
        self.shared().gpus.warm([&local.memory]);
        Ok(Region {
            local,
            shared: Arc::clone(self.shared()),
        })
    }

    /// Registers a KV cache: the layout and the memory of each of its regions. Peers reach its
    /// blocks only by reference.
    ///
    /// # Errors
    /// `Layout` when the memory doesn't fit the layout or the shard contradicts it, `Closed`.
    pub fn register_kv_cache(
        &self,
        memory: impl IntoIterator<Item = impl Into<Memory>>,
        layout: KvLayout,
        shard: Shard,
        model: &str,
    ) -> Result<KvCache> {
        shard.validate_for(&layout)?;
        let memory: Vec<Memory> = memory.into_iter().map(Into::into).collect();
        let sizes: Vec<u64> = memory.iter().map(Memory::len).collect();
        if sizes != layout.region_bytes() {
            return Err(Error::new(
                ErrorKind::Layout,
                "register_kv_cache",
                format!(
                    "the layout needs regions of `{:?}` bytes, the memory has `{sizes:?}`",
                    layout.region_bytes()
                ),
            ));
        }
        let fingerprint = fingerprint(model, &layout, &shard);
        let offered: Vec<Offered> = memory.iter().cloned().map(Into::into).collect();
        let movable = Witnesses::of(memory.iter().filter_map(Memory::device)).into();
        let local = self.shared().announce("register_kv_cache", |registry| {
            let names = (0..).map(|index| format!("kv.{index}"));
            let regions: Vec<_> = offered
                .into_iter()
                .zip(names)
                .map(|(offered, name)| registry.add_region(name, offered, false))
                .collect();
            let local = registry.add_cache(|id| LocalCache {
                id,
                fingerprint,
                layout: Arc::new(layout),
                regions: regions.iter().map(|region| region.id).collect(),
                memory: Arc::new(memory.into()),
                shard,
                model: model.to_owned(),
                movable,
            });
            let regions = regions.iter().map(|region| region.advert()).collect();
            let caches = vec![local.advert()];
            (local, Advertise { regions, caches })
        })?;
        self.shared().gpus.warm(local.memory.iter());
        Ok(KvCache {
            local,
            shared: Arc::clone(self.shared()),
        })
    }

    /// Connects to another engine and finds every way into its memory. Blocks for at most `timeout`.
    ///
    /// # Errors
    /// `PeerUnreachable`, `Handshake` (every differing field), `Config`, `Closed`.
    pub fn connect(&self, address: &str, timeout: Duration) -> Result<Peer> {
        crate::connect::connect(self.shared(), address, timeout)
    }

    /// The connection to the engine that made a reference.
    ///
    /// # Errors
    /// `ReferenceRestarted` when another life of it is connected, `PeerUnreachable` when none is.
    pub fn peer_for(&self, reference: &Reference) -> Result<Peer> {
        let link = self.shared().link_for(reference)?;
        Ok(Peer {
            link,
            shared: Arc::clone(self.shared()),
        })
    }

    /// The names of all connected peers, and whether we connected to them.
    pub fn peers(&self) -> Vec<(String, bool)> {
        self.shared()
            .lock()
            .peers
            .values()
            .map(|entry| (entry.name.clone(), entry.link.is_some()))
            .collect()
    }

    /// Accepts the oldest pipe of this name that a peer has opened, from this life of an engine if one is named. `None`
    /// when none came within `wait`. An item of more than `max_item_bytes` ends the pipe.
    ///
    /// # Errors
    /// `Closed`, `Capacity` when the process has no descriptor left, `Unsupported` in a forked child.
    pub fn accept_pipe(
        &self,
        channel: &[u8],
        incarnation: Option<Incarnation>,
        max_item_bytes: u64,
        wait: Duration,
    ) -> Result<Option<PipeReceiver>> {
        let found = self.shared().pipes.accept(self.shared(), channel, incarnation, wait)?;
        found
            .map(|guest| PipeReceiver::new(self.shared(), guest, max_item_bytes))
            .transpose()
    }

    /// The notifications that came since the last call, oldest first, each with its sender's name.
    pub fn notifications(&self) -> Vec<(String, Vec<u8>)> {
        self.shared().inbox.take()
    }

    /// The transfers that end from now on, for an event loop: each caller has a descriptor and a queue of its own.
    ///
    /// # Errors
    /// `Closed`, `Capacity` when the system gives no descriptor, `Unsupported` in a forked child.
    pub fn completions(&self) -> Result<Completions> {
        let shared = self.shared();
        shared.check_process("completions")?;
        shared.completions.add()
    }

    /// The exports and offers of this engine that ended since the last call and whose blocks may be reused,
    /// oldest first. Collected from the first call on, or from the first issuer; the last 131,072 are kept.
    pub fn take_ended(&self) -> Vec<ExportId> {
        self.shared().ended.take()
    }

    /// Counters.
    pub fn stats(&self) -> EngineStats {
        EngineStats::of(self.shared())
    }

    /// Ends everything: exports are released, peers are told, threads end. Waits, for five seconds at
    /// most, until peers have stopped writing into offered blocks and transfers are quiesced; dropping the
    /// last handle does not. In a forked child it does nothing. Doing it twice is no error: who closes while another does waits for
    /// that one's end and gets its answer, except on the thread that closes already, or on one of pdkv's, where finalizers may do it.
    ///
    /// Gives whether that is so. Peers with raw access, or those that read an export, are not known. A forked child doesn't know.
    pub fn close(&self) -> bool {
        self.owner.close(CLOSE_WAIT)
    }
}

fn listen(address: std::net::SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).map_err(|error| {
        let hint = if error.kind() == std::io::ErrorKind::AddrNotAvailable {
            "no interface of this host has that address: `ip address` lists them"
        } else {
            "is the port taken? port 0 lets the system choose"
        };
        Error::new(ErrorKind::Config, "listen", format!("`{address}` can't be bound"))
            .with_hint(hint)
            .with_source(error)
    })
}

fn start(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Capacity, "start", "the system gives no more descriptors").with_source(error)
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Engine({}, {})",
            self.name(),
            self.address().unwrap_or("not listening")
        )
    }
}

/// Memory that connected peers may read and write by raw one-sided operations.
#[derive(Clone)]
pub struct Region {
    local: Arc<LocalRegion>,
    shared: Arc<Shared>,
}

/// What a peer needs to name a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionDescriptor {
    /// Name of the owning engine.
    pub engine: String,
    /// Its life.
    pub incarnation: Incarnation,
    /// The region, in the owner's numbering.
    pub region: RegionId,
    /// Bytes.
    pub len: u64,
}

impl Region {
    /// Its id within the engine.
    pub fn id(&self) -> RegionId {
        self.local.id
    }

    /// Its memory.
    pub fn memory(&self) -> &Memory {
        &self.local.memory
    }

    /// Whether peers on this host can map all of it, as they were told when it was registered.
    pub fn is_shared(&self) -> bool {
        self.local.is_shared()
    }

    /// What a peer needs to name it.
    pub fn describe(&self) -> RegionDescriptor {
        RegionDescriptor {
            engine: self.shared.name.clone(),
            incarnation: self.shared.incarnation,
            region: self.local.id,
            len: self.local.memory.len(),
        }
    }

    /// Forgets the region; peers unmap it. Transfers that are running keep the memory alive.
    ///
    /// # Errors
    /// `Region` when it was deregistered before.
    pub fn deregister(&self) -> Result<()> {
        if !self.shared.registry.remove_region(self.local.id) {
            return Err(Error::new(
                ErrorKind::Region,
                "deregister",
                format!("region `{}` is not registered", self.local.id),
            ));
        }
        self.shared.ucx.forget(&self.local.memory);
        self.shared.gpus.forget(&self.local.memory);
        self.shared.lanes.wake_all();
        self.shared.withdraw(Withdraw {
            regions: vec![self.local.id],
            caches: Vec::new(),
        });
        Ok(())
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({}, {} bytes)", self.id(), self.local.memory.len())
    }
}
