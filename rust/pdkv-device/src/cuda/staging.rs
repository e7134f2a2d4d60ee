//! Pinned host memory that device memory goes through where a link carries host memory only.
//!
//! It is bounded: a stage that is not free is waited for, in turn ([`turns`](super::turns)), and no peer gets so many that there are none for
//! others. What is gathered into a stage lies in the order in which it was named, one piece behind the other, so that a socket sends or fills
//! the stage as one piece. While that goes on it is the peer's time, of which there is an end once others wait.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pdkv_core::{Error, ErrorKind, Result};

use super::gpu::Gpu;
use super::host_paths::HostPaths;
use super::peer_clock::PeerClock;
use super::stage::{Parts, Stage};
use super::turns::{Holder, Place, Turns};
use crate::os::page_bytes;
use crate::stream::Stop;

/// Bytes of one stage at most, with all that it pins beside its room: as much as a thread of a host link moves in one turn.
pub const STAGE_BYTES: u64 = 4 << 20;
/// Which part of a stage is for the tables of its copies: enough for pieces of 2 KiB, and smaller ones are copied some at a time.
const TABLES_PART: u64 = 32;
/// How long one look at the stop flag may be delayed.
const SLICE: Duration = Duration::from_millis(50);
pub(super) const STAGE: &str = "stage device memory";

/// The stages of one GPU; each is made when it is first needed.
#[derive(Debug)]
pub struct Staging {
    gpu: Gpu,
    size: Size,
    most: usize,
    /// How long a peer may keep a stage waiting while others wait for one.
    patience: Duration,
    /// What is to be done whatever was measured.
    paths: Option<HostPaths>,
    /// Whether copies to and from stages are compared with what they read.
    verify: bool,
    shelf: Mutex<Shelf>,
    freed: Condvar,
}

/// The least that stages are made of: one of sixteen pages, which is worth its copies.
pub fn least_staging_bytes() -> u64 {
    16 * page_bytes()
}

/// What one stage pins, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size {
    room: u64,
    tables: u64,
    flag: u64,
}

impl Size {
    /// Of a stage that pins so many bytes in all, or less by a part of a page: no less than a page is pinned of anything.
    fn of(bytes: u64, page: u64) -> Self {
        let pages = |bytes: u64| bytes / page * page;
        let tables = pages(bytes / TABLES_PART).max(page);
        Self {
            room: pages(bytes) - tables - page,
            tables,
            flag: page,
        }
    }

    fn total(self) -> u64 {
        self.room + self.tables + self.flag
    }
}

#[derive(Debug)]
struct Shelf {
    idle: Vec<Parts>,
    turns: Turns,
    /// Of the stages that are taken, by a number of their own, and whose they are.
    clocks: BTreeMap<u64, (Holder, Arc<PeerClock>)>,
    next: u64,
}

/// A place in the queue, left when dropped. Made before the shelf is locked, so that it goes after the lock on any way out.
struct Waiting<'a> {
    staging: &'a Staging,
    place: Option<Place>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.staging.shelf().turns.leave(place);
            // Whoever is behind may be next.
            self.staging.freed.notify_all();
        }
    }
}

/// What is to be given back.
#[derive(Debug)]
pub(super) struct Taken {
    holder: Holder,
    number: u64,
    pub(super) clock: Arc<PeerClock>,
}

impl Staging {
    /// Stages on a GPU, which pin so many bytes together at most, the tables of their copies included. While others wait a peer has `patience`
    /// to take or to bring the bytes of one. With `verify` what was copied to or from a stage is read back, and compared by checksums.
    ///
    /// # Errors
    /// `Config` for less than [`least_staging_bytes`].
    pub fn new(gpu: &Gpu, bytes: u64, patience: Duration, verify: bool) -> Result<Arc<Self>> {
        Self::make(gpu, bytes, patience, None, verify)
    }

    /// The same with a way to copy that no measurement changes.
    ///
    /// # Errors
    /// As [`Staging::new`].
    pub fn forced(gpu: &Gpu, bytes: u64, patience: Duration, paths: HostPaths) -> Result<Arc<Self>> {
        Self::make(gpu, bytes, patience, Some(paths), false)
    }

    fn make(gpu: &Gpu, bytes: u64, patience: Duration, paths: Option<HostPaths>, verify: bool) -> Result<Arc<Self>> {
        let least = least_staging_bytes();
        if bytes < least {
            let message = format!("`{bytes}` bytes of pinned memory, `{least}` is the least");
            return Err(Error::new(ErrorKind::Config, STAGE, message));
        }
        let size = Size::of(bytes.min(STAGE_BYTES), page_bytes());
        let most = (bytes / size.total()) as usize;
        Ok(Arc::new(Self {
            gpu: gpu.clone(),
            size,
            most,
            patience,
            verify,
            paths,
            shelf: Mutex::new(Shelf {
                idle: Vec::new(),
                turns: Turns::new(most),
                clocks: BTreeMap::new(),
                next: 0,
            }),
            freed: Condvar::new(),
        }))
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// A free stage for one of a peer's payloads. Waits for its turn, and looks at `stop` meanwhile; other peers that have kept theirs
    /// waiting for too long are told that their time is over.
    ///
    /// # Errors
    /// `TransferCancelled` when stopped, `Unsupported` or `Device` when a new stage cannot be made.
    pub fn take(self: &Arc<Self>, holder: Holder, stop: &dyn Stop) -> Result<Stage> {
        let mut waiting = Waiting {
            staging: self,
            place: None,
        };
        let mut shelf = self.shelf();
        // Before anybody comes or goes, so that it is known for which time somebody has waited.
        self.look(&shelf);
        let place = *waiting.place.insert(shelf.turns.join(holder));
        loop {
            if stop.stopped() {
                let text = "stopped while all stages were in use";
                return Err(Error::new(ErrorKind::TransferCancelled, STAGE, text));
            }
            if shelf.turns.take(place) {
                waiting.place = None;
                break;
            }
            let waited = self.freed.wait_timeout(shelf, SLICE);
            shelf = waited.unwrap_or_else(PoisonError::into_inner).0;
            self.look(&shelf);
        }
        let clock = Arc::new(PeerClock::default());
        let number = shelf.next;
        shelf.next += 1;
        shelf.clocks.insert(number, (holder, Arc::clone(&clock)));
        let idle = shelf.idle.pop();
        drop(shelf);
        // There may be one for the next, too.
        self.freed.notify_all();
        let taken = Taken { holder, number, clock };
        let mut stage = Stage::new(self, taken, idle);
        let Size { room, tables, .. } = self.size;
        stage.furnish(|| Parts::new(&self.gpu, room, tables, self.paths, self.verify))?;
        Ok(stage)
    }

    /// Has the clocks of all peers count the time since the last look, if others have waited for it.
    fn look(&self, shelf: &Shelf) {
        let now = Instant::now();
        for (holder, clock) in shelf.clocks.values() {
            // Who waits for stages of its own is nobody else.
            clock.look(now, shelf.turns.others_wait(*holder), self.patience);
        }
    }

    /// A stage is free again, with what the next user will find there.
    pub(super) fn give_back(&self, taken: &Taken, parts: Option<Parts>) {
        let mut shelf = self.shelf();
        shelf.idle.extend(parts);
        shelf.clocks.remove(&taken.number);
        shelf.turns.give_back(taken.holder);
        drop(shelf);
        self.freed.notify_all();
    }

    pub(super) fn stage_bytes(&self) -> u64 {
        self.size.room
    }

    pub(super) fn patience(&self) -> Duration {
        self.patience
    }

    /// Bytes that the stages pin when all are there.
    pub fn bytes(&self) -> u64 {
        self.size.total() * self.most as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_is_of_whole_pages_and_no_larger_than_was_said() {
        for page in [4096, 64 << 10] {
            for bytes in [16 * page, 16 * page + 1, 100 * page - 1, STAGE_BYTES, STAGE_BYTES + 1] {
                let size = Size::of(bytes, page);
                assert!(size.total() <= bytes && size.total() + page > bytes, "{size:?}");
                assert!(
                    [size.room, size.tables, size.flag]
                        .iter()
                        .all(|part| part % page == 0 && *part > 0)
                );
                assert!(size.room >= bytes / 32 * 27, "{size:?} of {bytes}");
            }
        }
    }
}
