//! The work of one transfer while bytes move: a proven plan, the memory on both ends, and a counter
//! from which threads take unit ranges until nothing is left.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use pdkv_core::id::TransferId;
use pdkv_core::plan::{PageWalk, Plan};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::Event;

use crate::lists::Memories;
use crate::mapping::Mapped;
use crate::raw_fence::RawFence;
use crate::remains::Remains;
use crate::remote::{RegionList, RemoteRegion};
use crate::shared::Shared;
use crate::transfer::TransferCore;
use crate::transport::gpu::Reached;

/// Which way the bytes go, seen from the engine that does the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the peer's memory into ours.
    Read,
    /// From our memory into the peer's.
    Write,
}

/// What is to be moved, in units that threads can take in any order.
pub(crate) enum Program {
    /// Both sides' places are known: one-sided transports, and raw spans on any transport.
    Joint(Plan),
    /// Our own pages in an order that the peer walks too: claims on a two-sided transport.
    Own(PageWalk),
}

impl Program {
    pub(crate) fn unit_count(&self) -> u64 {
        match self {
            Self::Joint(plan) => plan.unit_count(),
            Self::Own(walk) => walk.unit_count(),
        }
    }

    pub(crate) fn total_bytes(&self) -> u64 {
        match self {
            Self::Joint(plan) => plan.total_bytes(),
            Self::Own(walk) => walk.total_bytes(),
        }
    }
}

/// At most this many bytes are one turn of a copy thread: about a millisecond.
const CHUNK_BYTES: u64 = 4 << 20;

pub(crate) struct Work {
    pub(crate) core: Arc<TransferCore>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) direction: Direction,
    pub(crate) program: Program,
    /// What must have passed before a byte is touched.
    pub(crate) after: Option<Arc<Event>>,
    /// By the program's region index on our side.
    pub(crate) local: Arc<Memories>,
    /// By the program's region index on the peer's side.
    pub(crate) remote: RegionList,
    /// Where it has to come by after its last byte, whoever moves it.
    fence: Option<Arc<RawFence>>,
    started: Instant,
    chunk_units: u64,
    next: AtomicU64,
    hands: AtomicUsize,
    bytes: AtomicU64,
    runs: AtomicU64,
    staged: AtomicU64,
    failed: AtomicBool,
    failure: Mutex<Option<Error>>,
    mapped: OnceLock<Vec<Option<Mapped>>>,
    /// Its end was told.
    reported: AtomicBool,
    /// What the GPU that copies reaches; kept until nobody works on this any more.
    pub(crate) reaches: OnceLock<Reached>,
}

impl Work {
    pub(crate) fn new(
        core: Arc<TransferCore>,
        shared: Arc<Shared>,
        direction: Direction,
        program: Program,
        after: Option<Arc<Event>>,
        local: Arc<Memories>,
        remote: RegionList,
    ) -> Self {
        let units = program.unit_count().max(1);
        let unit_bytes = (program.total_bytes() / units).max(1);
        Self {
            core,
            shared,
            direction,
            after,
            local,
            remote,
            fence: None,
            started: Instant::now(),
            chunk_units: (CHUNK_BYTES / unit_bytes).max(1),
            next: AtomicU64::new(0),
            hands: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
            runs: AtomicU64::new(0),
            staged: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            mapped: OnceLock::new(),
            reported: AtomicBool::new(false),
            reaches: OnceLock::new(),
            program,
        }
    }

    /// The same, which is done only once this fence has let it pass.
    pub(crate) fn behind(mut self, fence: Option<Arc<RawFence>>) -> Self {
        self.fence = fence;
        self
    }

    pub(crate) fn id(&self) -> TransferId {
        self.core.id()
    }

    /// Says how many threads will call [`leave`](Self::leave). Before any of them starts.
    pub(crate) fn employ(&self, hands: usize) {
        self.hands.store(hands, Ordering::Relaxed);
        self.core.begin_moving();
    }

    /// How many turns the whole work takes.
    pub(crate) fn turns(&self) -> u64 {
        self.program.unit_count().div_ceil(self.chunk_units)
    }

    /// The mappings of the remote regions, as `find` finds them the first time.
    pub(crate) fn mapped(
        &self,
        find: impl Fn(&Arc<RemoteRegion>) -> Result<Option<Mapped>>,
    ) -> Result<&[Option<Mapped>]> {
        if let Some(mapped) = self.mapped.get() {
            return Ok(mapped);
        }
        let mapped = self.remote.iter().map(find).collect::<Result<Vec<_>>>()?;
        Ok(self.mapped.get_or_init(|| mapped))
    }

    /// The next range of units, until none is left, something failed or the transfer is to stop.
    pub(crate) fn claim(&self) -> Option<Range<u64>> {
        if self.failed.load(Ordering::Relaxed) || self.core.stop.load(Ordering::Relaxed) {
            return None;
        }
        let start = self.next.fetch_add(self.chunk_units, Ordering::Relaxed);
        let count = self.program.unit_count();
        (start < count).then(|| start..(start + self.chunk_units).min(count))
    }

    /// Whether units are left that nobody has taken.
    pub(crate) fn is_unclaimed(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.program.unit_count()
    }

    pub(crate) fn add_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts contiguous pieces for the figures.
    pub(crate) fn add_runs(&self, runs: u64) {
        self.runs.fetch_add(runs, Ordering::Relaxed);
    }

    /// Counts bytes that were put together anywhere but in their pages.
    pub(crate) fn add_staged(&self, bytes: u64) {
        self.staged.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Whether its transfer is to stop.
    pub(crate) fn stopped(&self) -> bool {
        self.core.stopped()
    }

    /// Blocks until what it comes after has passed, or its transfer is to stop.
    pub(crate) fn await_event(&self) -> Result<()> {
        let Some(after) = &self.after else { return Ok(()) };
        let mut pause = Duration::from_micros(20);
        while !self.stopped() && !after.passed()? {
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Whether anybody is still at it.
    pub(crate) fn has_hands(&self) -> bool {
        self.hands.load(Ordering::Acquire) > 0
    }

    /// Whether it has failed, in anybody's hands.
    pub(crate) fn failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Keeps the first failure; the others are its consequences.
    pub(crate) fn fail(&self, error: Error) {
        self.failure.lock().expect("no holder panics").get_or_insert(error);
        self.failed.store(true, Ordering::Relaxed);
    }

    /// It is not begun: nobody has touched memory for it.
    pub(crate) fn refuse(self: &Arc<Self>, error: Error) {
        self.employ(1);
        self.fail(error);
        self.leave();
    }

    /// One thread has stopped touching memory for this work. The last one reports the end, or has its fence do so.
    pub(crate) fn leave(self: &Arc<Self>) {
        if self.hands.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        match (self.result(), &self.fence) {
            (Ok(bytes), Some(fence)) if bytes > 0 && !self.stopped() => fence.enter(Arc::clone(self), bytes),
            (result, _) => self.report(result),
        }
    }

    /// Says how it ended, when nobody touches memory for it any more. Once.
    pub(crate) fn report(self: &Arc<Self>, result: Result<u64>) {
        self.reported.store(true, Ordering::Relaxed);
        self.shared.moved(self, result);
    }

    fn result(&self) -> Result<u64> {
        if let Some(error) = self.failure.lock().expect("no holder panics").take() {
            return Err(error);
        }
        let bytes = self.bytes.load(Ordering::Acquire);
        let expected = self.program.total_bytes();
        self.core.edit_stats(|stats| {
            stats.bytes = bytes;
            stats.runs = self.runs.load(Ordering::Relaxed);
            stats.staged_bytes = self.staged.load(Ordering::Relaxed);
            stats.wire_us = self.started.elapsed().as_secs_f64() * 1e6;
        });
        if self.core.stop.load(Ordering::Relaxed) && bytes < expected {
            return Err(Error::new(
                ErrorKind::TransferCancelled,
                "move",
                "stopped before the last byte",
            ));
        }
        if bytes != expected {
            return Err(Error::new(
                ErrorKind::Internal,
                "move",
                format!("placed `{bytes}` bytes of a plan of `{expected}`"),
            ));
        }
        self.core.placed();
        Ok(bytes)
    }
}

impl Drop for Work {
    /// Whoever came last may be the progress thread, or the one that a GPU's other transfers wait for.
    fn drop(&mut self) {
        let mut remains = Remains::default();
        for list in self.reaches.take().into_iter().flatten() {
            remains.add_reaches(Arc::into_inner(list).unwrap_or_default());
        }
        let mapped = self.mapped.take().unwrap_or_default();
        remains.add_memory(mapped.into_iter().flatten().map(|mapped| mapped.memory));
        remains.add_memories(std::mem::take(&mut self.local));
        remains.add_regions(std::mem::take(&mut self.remote));
        remains.bury(&self.shared.movers);
        if !*self.reported.get_mut() {
            // Somebody panicked who was to leave. Nobody has it any more, so nobody touches memory for it; and whoever drops it may hold locks.
            let (shared, core) = (Arc::clone(&self.shared), Arc::clone(&self.core));
            let error = Error::new(ErrorKind::Internal, "move", "a thread that moved its bytes panicked");
            let told = move || shared.moved_id(core.id(), &core, Err(error));
            let _ = self.shared.movers.task(told);
        }
    }
}
