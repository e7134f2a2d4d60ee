//! Which address ranges of this process are regions now.
//!
//! Adoption asks it what it must not touch; registration asks it whether memory handed in as a bare
//! address lies inside a shared pool. It keeps nothing alive.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::region::HostRegion;

/// One live region.
pub(crate) struct Entry {
    serial: u64,
    start: u64,
    end: u64,
    region: Weak<HostRegion>,
}

#[derive(Default)]
pub(crate) struct Registry {
    next_serial: u64,
    entries: Vec<Entry>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
    next_serial: 0,
    entries: Vec::new(),
});

/// Locks the registry. Never drop an `Arc<HostRegion>` while holding the guard: its drop locks too.
pub(crate) fn lock() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registry {
    /// Reserves the number under which a region is entered and removed.
    pub(crate) fn serial(&mut self) -> u64 {
        self.next_serial += 1;
        self.next_serial
    }

    pub(crate) fn enter(&mut self, serial: u64, start: u64, len: u64, region: Weak<HostRegion>) {
        self.entries.push(Entry {
            serial,
            start,
            end: start.saturating_add(len),
            region,
        });
    }

    pub(crate) fn remove(&mut self, serial: u64) {
        self.entries.retain(|entry| entry.serial != serial);
    }
}

/// Live regions that hold `start..end` whole, newest first.
pub(crate) fn holding(start: u64, end: u64) -> Vec<Arc<HostRegion>> {
    let registry = lock();
    registry
        .entries
        .iter()
        .rev()
        .filter(|entry| entry.start <= start && end <= entry.end)
        .filter_map(|entry| entry.region.upgrade())
        .collect()
}
