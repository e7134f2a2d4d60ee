//! Lanes that lie on the device already: between the same two caches they are the same for every transfer.
//!
//! They are known by what they are, so nothing has to be forgotten when a cache goes. The memory is a ring: what was brought first is
//! overwritten first, in the order of the queue's stream, behind every launch that reads it.

use std::collections::VecDeque;

use pdkv_core::Result;

use super::context::Context;
use super::memory::DeviceBuffer;
use super::ring::Ring;
use crate::kernels::{Job, Lane};

/// Bytes of the memory: lanes of some hundred pairs of caches with eighty layers.
const ARENA_BYTES: usize = 1 << 20;
/// What one plan may take of it; longer tables go up with their post.
const MOST_BYTES: usize = ARENA_BYTES / 4;

#[derive(Debug)]
pub(super) struct LaneTables {
    arena: DeviceBuffer,
    ring: Ring,
    /// Oldest first.
    known: VecDeque<Known>,
}

#[derive(Debug)]
struct Known {
    /// Of all jobs, one job after the other.
    lanes: Vec<Lane>,
    address: u64,
    end: u64,
}

impl LaneTables {
    pub(super) fn new(context: &Context) -> Result<Self> {
        let arena = DeviceBuffer::new(context, ARENA_BYTES)?;
        Ok(Self {
            arena,
            ring: Ring::new(ARENA_BYTES),
            known: VecDeque::new(),
        })
    }

    /// Where the lanes of these jobs lie, one job after the other.
    pub(super) fn find(&self, jobs: &[Job]) -> Option<u64> {
        let same = |known: &&Known| {
            let mut rest = known.lanes.as_slice();
            jobs.iter().all(|job| match rest.split_at_checked(job.lanes.len()) {
                Some((lanes, after)) if lanes == job.lanes => {
                    rest = after;
                    true
                }
                _ => false,
            }) && rest.is_empty()
        };
        // Most transfers are between the pair that was met last.
        self.known.iter().rev().find(same).map(|known| known.address)
    }

    /// Takes room for the lanes of these jobs, which the caller brings there; `None` when they are too many for it.
    pub(super) fn add(&mut self, jobs: &[Job]) -> Option<u64> {
        let count: usize = jobs.iter().map(|job| job.lanes.len()).sum();
        let bytes = count * size_of::<Lane>();
        if bytes > MOST_BYTES {
            return None;
        }
        let taken = loop {
            match self.ring.take(bytes) {
                Some(taken) => break taken,
                None => self
                    .ring
                    .release(self.known.pop_front().map_or(u64::MAX, |oldest| oldest.end)),
            }
        };
        let address = self.arena.address() + taken.offset as u64;
        self.known.push_back(Known {
            lanes: jobs.iter().flat_map(|job| &job.lanes).copied().collect(),
            address,
            end: taken.end,
        });
        Some(address)
    }

    /// Forgets what was added last: it has not been brought.
    pub(super) fn forget_newest(&mut self) {
        self.known.pop_back();
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.arena.len()
    }
}
