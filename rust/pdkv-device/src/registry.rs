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
    moving: bool,
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

    /// Enters a region.
    pub(crate) fn enter(&mut self, serial: u64, start: u64, len: u64, region: Weak<HostRegion>) {
        let end = start.saturating_add(len);
        self.entries.push(Entry {
            serial,
            start,
            end,
            region,
            moving: false,
        });
    }

    /// Enters a range whose pages are about to move.
    pub(crate) fn enter_moving(&mut self, serial: u64, start: u64, end: u64) {
        self.entries.push(Entry {
            serial,
            start,
            end,
            region: Weak::new(),
            moving: true,
        });
    }

    /// A live region, or a range that is being adopted, that shares a byte with `start..end`.
    pub(crate) fn overlap(&self, start: u64, end: u64) -> Option<(u64, u64)> {
        self.entries
            .iter()
            .find(|entry| entry.start < end && start < entry.end)
            .map(|entry| (entry.start, entry.end))
    }

    /// Whether a range that shares a byte with `start..end` is being adopted right now.
    pub(crate) fn moving(&self, start: u64, end: u64) -> bool {
        self.entries
            .iter()
            .any(|entry| entry.moving && entry.start < end && start < entry.end)
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
