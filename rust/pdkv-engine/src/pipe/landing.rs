//! Memory that large items land in: shared with this host, registered for one peer only, and used again by the next
//! item of about its size once the application has let go of it, so that its pages are there and mapped at the peer.

use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use pdkv_core::id::PeerKey;
use pdkv_core::wire::{Advertise, Withdraw};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::{HostRegion, HugePages, Memory};

use crate::registry::LocalRegion;
use crate::shared::Shared;

/// The smallest slab, so that items that differ little share one.
const LEAST: u64 = 128 << 10;
/// Bytes kept for the next items.
const KEEP: u64 = 1 << 30;
/// Slabs of at most half this size share a descriptor: an application may hold thousands of tensors.
const ARENA: u64 = 64 << 20;
/// Free memory of the host that no item may take.
const SPARE: u64 = 256 << 20;

/// The slabs of one pipe.
pub(super) struct Slabs {
    shared: Weak<Shared>,
    peer: PeerKey,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Oldest first.
    free: Vec<Slab>,
    /// Those the application has.
    lent: Vec<Arc<LocalRegion>>,
    /// What the next small slab is cut from, and how much of it is.
    arena: Option<(Arc<HostRegion>, u64)>,
    closed: bool,
}

/// One registered piece of memory.
pub(super) struct Slab {
    region: Arc<LocalRegion>,
}

impl Slab {
    pub(super) fn region(&self) -> &LocalRegion {
        &self.region
    }

    fn len(&self) -> u64 {
        self.region.memory.len()
    }
}

/// The bytes to allocate for an item: an eighth of waste at most, and few different sizes.
fn class(nbytes: u64) -> u64 {
    let nbytes = nbytes.max(LEAST);
    let step = (nbytes.next_power_of_two() >> 4).max(4096);
    nbytes.next_multiple_of(step)
}

impl Slabs {
    pub(super) fn new(shared: &Arc<Shared>, peer: PeerKey) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::downgrade(shared),
            peer,
            state: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// A slab for an item of so many bytes, which the peer has been told of.
    ///
    /// # Errors
    /// `Capacity` when the host has no memory for it now, `PeerLost`, `Closed`.
    pub(super) fn take(&self, nbytes: u64) -> Result<Slab> {
        let want = class(nbytes);
        {
            let mut state = self.lock();
            if let Some(at) = state.free.iter().rposition(|slab| slab.len() == want) {
                return Ok(state.free.remove(at));
            }
        }
        let memory = self.carve(want)?;
        let closed = || Error::new(ErrorKind::Closed, "recv", "the engine is gone");
        let shared = self.shared.upgrade().ok_or_else(closed)?;
        let region = shared.announce_to(self.peer, "recv", |registry| {
            let region = registry.add_private(self.peer, "pipe".to_owned(), memory);
            let regions = vec![region.advert()];
            let advertise = Advertise {
                regions,
                caches: Vec::new(),
            };
            (region, advertise)
        })?;
        Ok(Slab { region })
    }

    /// Fresh memory: for a large slab its own, for a small one a part of what many share. What they share doubles
    /// each time, so that a pipe with few items takes little.
    fn carve(&self, len: u64) -> Result<Arc<HostRegion>> {
        if len > ARENA / 2 {
            check_room(len)?;
            return HostRegion::allocate(len, HugePages::Try);
        }
        let last = self.lock().arena.take();
        let size = match last {
            Some((arena, used)) if arena.len() - used >= len => {
                let part = arena.part(used, len)?;
                self.lock().arena = Some((arena, used + len));
                return Ok(part);
            }
            Some((arena, _)) => (2 * arena.len()).clamp(len, ARENA),
            None => len,
        };
        check_room(size)?;
        let arena = HostRegion::allocate(size, HugePages::Try)?;
        let part = arena.part(0, len)?;
        self.lock().arena = Some((arena, len));
        Ok(part)
    }

    /// Lends a slab to the application.
    pub(super) fn lend(self: &Arc<Self>, slab: Slab, nbytes: u64) -> Lease {
        let Slab { region } = slab;
        self.lock().lent.push(Arc::clone(&region));
        Lease {
            slabs: Arc::clone(self),
            region,
            len: nbytes,
        }
    }

    /// Takes a slab that nobody writes any more.
    pub(super) fn give_back(&self, slab: Slab) {
        let mut state = self.lock();
        let mut dropped = Vec::new();
        if state.closed {
            dropped.push(slab);
        } else {
            state.free.push(slab);
            let mut kept: u64 = state.free.iter().map(Slab::len).sum();
            while kept > KEEP && state.free.len() > 1 {
                let oldest = state.free.remove(0);
                kept -= oldest.len();
                dropped.push(oldest);
            }
        }
        drop(state);
        self.forget(dropped.into_iter().map(|slab| slab.region).collect());
    }

    /// Takes the registration of a slab back, and not the slab: somebody may be writing it.
    pub(super) fn strike(&self, slab: Slab) -> Memory {
        let memory = slab.region.memory.clone();
        self.forget(vec![slab.region]);
        memory
    }

    /// Ends all registrations. What the application has stays its own.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let arena = state.arena.take();
        let free = std::mem::take(&mut state.free).into_iter().map(|slab| slab.region);
        let regions = free.chain(std::mem::take(&mut state.lent)).collect();
        drop(state);
        drop(arena);
        self.forget(regions);
    }

    fn forget(&self, regions: Vec<Arc<LocalRegion>>) {
        if regions.is_empty() {
            return;
        }
        if let Some(shared) = self.shared.upgrade() {
            let ids = regions.iter().map(|region| region.id).collect::<Vec<_>>();
            for region in &regions {
                shared.registry.remove_region(region.id);
                shared.ucx.forget(&region.memory);
            }
            shared.lanes.wake_all();
            let withdraw = Withdraw {
                regions: ids,
                caches: Vec::new(),
            };
            shared.withdraw_from(self.peer, withdraw);
            // Unmapping much takes long; without a thread for it, it is done here.
            let _ = shared.movers.task(move || drop(regions));
        }
    }
}

/// A slab in the application's hands.
pub(super) struct Lease {
    slabs: Arc<Slabs>,
    region: Arc<LocalRegion>,
    len: u64,
}

impl Lease {
    pub(super) fn memory(&self) -> &Memory {
        &self.region.memory
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A forked child shares the memory but not the pipe, whose locks may be anybody's.
        let at_home = self.slabs.shared.upgrade().is_some_and(|shared| shared.at_home());
        if !at_home {
            return;
        }
        let mut state = self.slabs.lock();
        // After the close it is on no list.
        let found = state.lent.iter().position(|region| Arc::ptr_eq(region, &self.region));
        let Some(at) = found else { return };
        let region = state.lent.swap_remove(at);
        drop(state);
        self.slabs.give_back(Slab { region });
    }
}

/// # Errors
/// `Capacity` when an item of this size would take the memory that the host lives on.
fn check_room(nbytes: u64) -> Result<()> {
    let available = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
        kib.checked_mul(1024)
    });
    match available {
        Some(free) if nbytes.saturating_add(SPARE) > free => Err(Error::new(
            ErrorKind::Capacity,
            "recv",
            format!("an item takes `{nbytes}` bytes, of which this host has `{free}` left"),
        )
        .with_hint("it is not lost: let go of tensors and receive again, or close the pipe")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_few_and_waste_little() {
        let mut classes: Vec<u64> = (1..2000).map(|step| class(step * 100_003)).collect();
        for (step, &class) in (1..).zip(&classes) {
            let nbytes = (step * 100_003_u64).max(LEAST);
            assert!(class >= nbytes && (class - nbytes) * 8 <= nbytes, "{nbytes}: {class}");
            assert_eq!(class % 4096, 0);
        }
        classes.dedup();
        assert!(classes.len() < 100, "{}", classes.len());
        assert_eq!(class(335_544_320), 335_544_320);
    }

    #[test]
    fn an_item_larger_than_the_host_is_refused_before_it_is_tried() {
        assert_eq!(check_room(1 << 47).unwrap_err().kind(), ErrorKind::Capacity);
        check_room(1 << 20).unwrap();
    }
}
