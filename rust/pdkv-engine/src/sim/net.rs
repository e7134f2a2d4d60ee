//! Channels: ordered pipes of messages between two lives of two engines, with faults.

use core::time::Duration;

use pdkv_core::id::PeerKey;

use super::Faults;
use super::rng::Rng;

/// Which end of a channel: the connecting one is 0.
pub(super) type Side = usize;

#[derive(Clone, Debug)]
pub(super) struct End {
    pub(super) host: usize,
    pub(super) life: u32,
    pub(super) key: PeerKey,
    /// This end still believes in the channel.
    pub(super) up: bool,
    /// When the last message for this end arrives; the next can't be earlier.
    last_arrival: Duration,
    /// Messages for this end vanish without a sign.
    deaf: bool,
}

impl End {
    pub(super) fn new(host: usize, life: u32, key: PeerKey) -> Self {
        Self {
            host,
            life,
            key,
            up: true,
            last_arrival: Duration::ZERO,
            deaf: false,
        }
    }
}

#[derive(Debug)]
pub(super) struct Channel {
    pub(super) ends: [End; 2],
    /// Nothing passes any more.
    pub(super) cut: bool,
}

impl Channel {
    /// When a message sent now arrives at `to`: never, once, or twice.
    pub(super) fn arrivals(&mut self, now: Duration, to: Side, faults: &Faults, rng: &mut Rng) -> Vec<Duration> {
        let end = &mut self.ends[to];
        if self.cut || end.deaf || rng.chance(faults.drop) {
            return Vec::new();
        }
        let copies = if rng.chance(faults.duplicate) { 2 } else { 1 };
        (0..copies)
            .map(|_| {
                end.last_arrival = end.last_arrival.max(now + rng.time(faults.max_delay));
                end.last_arrival
            })
            .collect()
    }

    /// One direction goes dead.
    pub(super) fn deafen(&mut self, to: Side) {
        self.ends[to].deaf = true;
    }
}
