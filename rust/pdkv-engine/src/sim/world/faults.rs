//! Faults of channels and processes, rolled once a second.

use core::time::Duration;

use super::super::host::Host;
use super::{Event, World};

impl World {
    pub(super) fn roll_faults(&mut self) {
        let faults = self.config.faults.clone();
        for channel in 0..self.channels.len() {
            if self.channels[channel].cut {
                continue;
            }
            if self.rng.chance(faults.cut) {
                for side in 0..2 {
                    self.after(Duration::from_secs(1), Event::Down { channel, side });
                }
            }
            if self.rng.chance(faults.half_open) {
                let to = self.rng.below(2) as usize;
                self.channels[channel].deafen(to);
            }
        }
        for host in 0..self.hosts.len() {
            if self.hosts[host].alive && self.rng.chance(faults.crash) {
                self.crash(host);
            }
        }
    }

    /// The process is killed: its movers write no more, and the others may or may not be told.
    fn crash(&mut self, host: usize) {
        self.report.crashes += 1;
        let it = &mut self.hosts[host];
        it.alive = false;
        let unfinished = it.transfers.values().filter(|begun| !begun.finished).count();
        self.report.crashed += unfinished as u64;
        it.movers.clear();
        let channels: Vec<_> = it.channels.values().copied().collect();
        let told = self.rng.chance(700);
        for (channel, side) in channels {
            self.channels[channel].cut = true;
            self.channels[channel].ends[side].up = false;
            if told {
                self.after(
                    Duration::from_millis(200),
                    Event::Down {
                        channel,
                        side: 1 - side,
                    },
                );
            }
        }
        self.after(Duration::from_secs(2), Event::Revive { host });
    }

    pub(super) fn revive(&mut self, host: usize) {
        let life = self.hosts[host].life + 1;
        self.hosts[host] = Host::new(host, life, &self.config, &mut self.rng);
    }
}
