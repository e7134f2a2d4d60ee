//! A world of engines on virtual time: the real protocol code under delay, loss, duplication, cut and
//! half-open channels, crashes, restarts and clocks that disagree.
//!
//! One seed is one history, so a failing seed replays. Memory is modelled as one word per (layer,
//! block) whose value names the export it belongs to; movers copy words one by one and take their
//! time, so that a late write or a foreign byte shows. Nothing here touches a socket, a thread or a
//! clock.

mod host;
mod memory;
mod net;
mod rng;
mod world;

use core::time::Duration;

use rng::Rng;
use world::World;

/// What the world does to its engines. Chances are per message or per second, out of 1000.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults {
    /// Longest delay of a message; each is delayed between nothing and this.
    pub max_delay: Duration,
    /// Chance that a message vanishes although its channel lives on.
    pub drop: u32,
    /// Chance that a message comes twice.
    pub duplicate: u32,
    /// Chance per second that a channel is cut, both sides noticing at their own time.
    pub cut: u32,
    /// Chance per second that one direction of a channel goes dead without a sign.
    pub half_open: u32,
    /// Chance per second that an engine is killed; it comes back as another life.
    pub crash: u32,
    /// How far the engines' clocks differ in speed, in parts per thousand.
    pub drift: u32,
    /// Chance per unit that a mover fails.
    pub mover: u32,
}

impl Faults {
    /// A network that only delays.
    pub fn none() -> Self {
        Self {
            max_delay: Duration::from_millis(2),
            drop: 0,
            duplicate: 0,
            cut: 0,
            half_open: 0,
            crash: 0,
            drift: 0,
            mover: 0,
        }
    }

    /// A mix that differs from seed to seed: each kind of fault is often absent and sometimes fierce.
    pub fn from_seed(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0xfa17);
        let mut some = |most: u64| if rng.chance(500) { rng.below(most + 1) as u32 } else { 0 };
        Self {
            max_delay: Duration::from_millis(1 + u64::from(some(400))),
            drop: some(150),
            duplicate: some(150),
            cut: some(120),
            half_open: some(120),
            crash: some(150),
            drift: some(20),
            mover: some(10),
        }
    }
}

/// Size of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimConfig {
    /// Engines.
    pub engines: usize,
    /// Exports and offers made over the whole run.
    pub exports: usize,
    /// Blocks of each engine's cache.
    pub blocks: u32,
    /// Layers of the caches.
    pub layers: u32,
    /// Time in which things are begun; the run then goes on until everything must have ended.
    pub span: Duration,
    /// What goes wrong.
    pub faults: Faults,
}

impl SimConfig {
    /// A small world with the fault mix of the seed.
    pub fn from_seed(seed: u64) -> Self {
        Self {
            engines: 3,
            exports: 12,
            blocks: 48,
            layers: 2,
            span: Duration::from_secs(6),
            faults: Faults::from_seed(seed),
        }
    }
}

/// What happened in one history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The seed, for the replay.
    pub seed: u64,
    /// Promises that were broken; empty is the only good value.
    pub violations: Vec<String>,
    /// Transfers begun.
    pub begun: u64,
    /// Transfers that ended valid.
    pub done: u64,
    /// Transfers that failed.
    pub failed: u64,
    /// Transfers that were cancelled.
    pub cancelled: u64,
    /// Transfers that died with their engine.
    pub crashed: u64,
    /// Offers filled, each verified word by word.
    pub filled: u64,
    /// References issued ahead of their exports.
    pub promised: u64,
    /// Claims that waited where such an export was made.
    pub early: u64,
    /// Exports and offers that ended, however.
    pub exports_ended: u64,
    /// Messages delivered.
    pub messages: u64,
    /// Engines killed.
    pub crashes: u64,
}

/// Runs one history to its end.
pub fn run(seed: u64, config: &SimConfig) -> Report {
    World::new(seed, config.clone()).run()
}
