//! One engine of the world: a node, its clock, its memory, its movers, and what its application holds.

use core::time::Duration;
use std::collections::BTreeMap;

use pdkv_core::ErrorKind;
use pdkv_core::id::{ExportId, Incarnation, PeerKey, TransferId};
use pdkv_core::node::{Identity, Node, NodeConfig, Now};
use pdkv_core::reference::ExportKind;
use pdkv_core::session::{MAX_VERSION, MIN_VERSION, features};
use pdkv_core::wire::{Hello, HostFacts};

use super::SimConfig;
use super::memory::Memory;
use super::net::Side;
use super::rng::Rng;

/// An export whose blocks the application must not reuse yet.
#[derive(Debug)]
pub(super) struct Exported {
    pub(super) blocks: Vec<u32>,
    pub(super) layers: u32,
}

/// A transfer the application waits for.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) kind: ExportKind,
    pub(super) export: ExportId,
    pub(super) blocks: Vec<u32>,
    pub(super) first_block: u32,
    pub(super) layers: core::ops::Range<u32>,
    pub(super) deadline: Now,
    /// The refusal that this claim was made to provoke.
    pub(super) spoiled: Option<ErrorKind>,
    pub(super) finished: bool,
    pub(super) moved: bool,
}

/// A running copy, one word at a time.
#[derive(Debug)]
pub(super) struct Mover {
    pub(super) channel: usize,
    pub(super) kind: ExportKind,
    pub(super) export: ExportId,
    /// (layer, block here, block there).
    pub(super) units: Vec<(u32, u32, u32)>,
    pub(super) next: usize,
    pub(super) stop: bool,
    /// The owner's side does its half, as over sockets.
    pub(super) served: bool,
    pub(super) unit_time: Duration,
}

#[derive(Debug)]
pub(super) struct Host {
    pub(super) index: usize,
    pub(super) life: u32,
    pub(super) alive: bool,
    pub(super) node: Node,
    pub(super) memory: Memory,
    pub(super) movers: BTreeMap<TransferId, Mover>,
    pub(super) exports: BTreeMap<ExportId, Exported>,
    pub(super) transfers: BTreeMap<TransferId, Begun>,
    pub(super) channels: BTreeMap<PeerKey, (usize, Side)>,
    pub(super) wake_at: Option<Duration>,
    next_key: u64,
    offset: Duration,
    /// Speed of the clock, in thousandths.
    speed: u64,
}

pub(super) fn node_config() -> NodeConfig {
    NodeConfig {
        heartbeat: Duration::from_millis(500),
        peer_timeout: Duration::from_millis(2500),
        lease: Duration::from_secs(1),
        max_lease: Duration::from_secs(4),
        max_claim: Duration::from_secs(4),
        early_claim: Duration::from_millis(1500),
        ..NodeConfig::default()
    }
}

impl Host {
    pub(super) fn new(index: usize, life: u32, config: &SimConfig, rng: &mut Rng) -> Self {
        let drift = u64::from(config.faults.drift);
        let identity = Identity {
            name: format!("engine-{index}"),
            incarnation: Incarnation::new(rng.bytes()),
            address: format!("sim:{index}"),
            mac_key: rng.bytes(),
        };
        Self {
            index,
            life,
            alive: true,
            node: Node::new(node_config(), identity),
            memory: Memory::new(config.blocks, config.layers),
            movers: BTreeMap::new(),
            exports: BTreeMap::new(),
            transfers: BTreeMap::new(),
            channels: BTreeMap::new(),
            wake_at: None,
            next_key: 1,
            offset: rng.time(Duration::from_secs(100_000)),
            speed: 1000 - drift + rng.below(2 * drift + 1),
        }
    }

    /// What this engine's clock shows at a moment of the world.
    pub(super) fn clock(&self, world: Duration) -> Now {
        self.offset + Duration::from_nanos(world.as_nanos() as u64 * self.speed / 1000)
    }

    /// The first moment of the world at which the clock shows `at`.
    pub(super) fn moment(&self, at: Now) -> Duration {
        let local = at.saturating_sub(self.offset).as_nanos() as u64;
        Duration::from_nanos((local * 1000).div_ceil(self.speed))
    }

    pub(super) fn new_key(&mut self) -> PeerKey {
        let key = PeerKey(self.next_key);
        self.next_key += 1;
        key
    }

    pub(super) fn hello(&self, attempt: [u8; 16]) -> Hello {
        let identity = self.node.identity();
        Hello {
            min_version: MIN_VERSION,
            max_version: MAX_VERSION,
            features: features::OURS,
            name: identity.name.clone(),
            incarnation: identity.incarnation,
            address: identity.address.clone(),
            host: HostFacts::default(),
            peer_timeout: self.node.config().peer_timeout,
            heartbeat: self.node.config().heartbeat,
            regions: Vec::new(),
            caches: Vec::new(),
            attempt,
        }
    }
}
