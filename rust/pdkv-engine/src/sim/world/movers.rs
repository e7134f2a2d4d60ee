//! Model movers: one word at a time, from the owner's memory or into it, each at its own moment.

use core::time::Duration;

use pdkv_core::id::{PeerKey, TransferId};
use pdkv_core::reference::ExportKind;
use pdkv_core::wire::Grant;
use pdkv_core::{Error, ErrorKind, Result};

use super::super::host::Mover;
use super::super::memory::Pin;
use super::apps::App;
use super::{Event, World};

/// What a step leaves.
enum Left {
    More,
    Nothing,
}

impl World {
    pub(super) fn start_mover(&mut self, host: usize, transfer: TransferId, peer: PeerKey, grant: &Grant) {
        let it = &mut self.hosts[host];
        let (Some(begun), Some(&(channel, _))) = (it.transfers.get_mut(&transfer), it.channels.get(&peer)) else {
            self.broken(format!("move for unknown transfer {transfer}"));
            return;
        };
        begun.moved = true;
        let served = grant.blocks.is_none();
        let theirs: Vec<u32> = grant
            .blocks
            .as_ref()
            .map(|table| table.iter().collect())
            .unwrap_or_default();
        let here = begun.blocks.clone();
        let pairs = here
            .iter()
            .enumerate()
            .map(|(n, &block)| (block, theirs.get(n).copied().unwrap_or(n as u32)));
        let pairs: Vec<_> = pairs.collect();
        let units = begun
            .layers
            .clone()
            .flat_map(|layer| pairs.iter().map(move |&(here, there)| (layer, here, there)));
        let slow = self.rng.chance(100);
        let mover = Mover {
            channel,
            kind: begun.kind,
            export: begun.export,
            units: units.collect(),
            next: 0,
            stop: false,
            served,
            unit_time: Duration::from_millis(if slow { 400 } else { 8 }),
        };
        let (life, unit_time) = (it.life, mover.unit_time);
        let (export, time) = (begun.export, unit_time * mover.units.len() as u32);
        if it.movers.insert(transfer, mover).is_some() {
            self.broken(format!("transfer {transfer} got a second mover"));
        }
        self.after(unit_time, Event::Step { host, life, transfer });
        if self.rng.chance(150) {
            // The owner changes its mind while the bytes move or the fence is under way.
            let end = &self.channels[channel].ends[1];
            let app = App::Release {
                host: end.host,
                life: end.life,
                export,
            };
            self.after(time, Event::App(app));
        }
    }

    pub(super) fn step(&mut self, host: usize, life: u32, transfer: TransferId) {
        if !self.hosts[host].alive || self.hosts[host].life != life {
            return;
        }
        let Some(mover) = self.hosts[host].movers.remove(&transfer) else {
            return;
        };
        let result = match self.copy_one(host, transfer, &mover) {
            Ok(Left::More) => {
                let unit_time = mover.unit_time;
                let mover = Mover {
                    next: mover.next + 1,
                    ..mover
                };
                self.hosts[host].movers.insert(transfer, mover);
                self.after(unit_time, Event::Step { host, life, transfer });
                return;
            }
            Ok(Left::Nothing) => Ok(mover.units.len() as u64 * 8),
            Err(error) => Err(error),
        };
        let it = &mut self.hosts[host];
        let now = it.clock(self.now);
        it.node.moved(now, transfer, result);
        self.pump(host);
    }

    fn copy_one(&mut self, host: usize, transfer: TransferId, mover: &Mover) -> Result<Left> {
        let fail = |text: &str| Err(Error::new(ErrorKind::Transfer, "sim move", text));
        if mover.stop {
            return fail("stopped");
        }
        if self.rng.chance(self.config.faults.mover) {
            return fail("the mover failed");
        }
        let Some(&(layer, here, there)) = mover.units.get(mover.next) else {
            return Ok(Left::Nothing);
        };
        let end = self.channels[mover.channel].ends[1].clone();
        let owner = &mut self.hosts[end.host];
        if !owner.alive || owner.life != end.life {
            return Err(Error::new(ErrorKind::PeerLost, "sim move", "the process is gone"));
        }
        let there = if mover.served {
            match owner.node.serve_started(end.key, transfer) {
                Some(view) => view.blocks.get(there as usize).unwrap_or_default(),
                None => return fail("the owner serves this claim no more"),
            }
        } else {
            there
        };
        let allowed = match mover.kind {
            ExportKind::Export => {
                let word = owner.memory.read(layer, there);
                self.hosts[host]
                    .memory
                    .write(layer, here, word, Pin::Transfer(transfer))
            }
            ExportKind::Offer => {
                let word = self.hosts[host].memory.read(layer, here);
                self.hosts[end.host]
                    .memory
                    .write(layer, there, word, Pin::Export(mover.export))
            }
        };
        if mover.served {
            let owner = &mut self.hosts[end.host];
            let now = owner.clock(self.now);
            owner.node.serve_ended(now, end.key, transfer, Ok(()));
            self.pump(end.host);
        }
        if !allowed {
            self.broken(format!(
                "transfer {transfer} of engine {host} wrote into a block that is free or another's"
            ));
        }
        Ok(Left::More)
    }

    /// An engine that lost a channel waits until the process behind it has no mover on its memory.
    pub(super) fn check_writer(&mut self, channel: usize, side: usize) {
        let Some(end) = self.living_end(channel, side) else {
            return;
        };
        let can_write = self.living_end(channel, 1 - side).is_some_and(|other| {
            let movers = self.hosts[other.host].movers.values();
            movers
                .into_iter()
                .any(|mover| mover.channel == channel && !mover.served)
        });
        if can_write {
            self.at(
                self.now + Duration::from_millis(50),
                Event::CheckWriter { channel, side },
            );
            return;
        }
        let host = &mut self.hosts[end.host];
        let now = host.clock(self.now);
        host.node.writer_dead(now, end.key);
        self.pump(end.host);
    }
}
