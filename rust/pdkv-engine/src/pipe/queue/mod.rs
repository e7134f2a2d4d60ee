//! What waits to be sent: small items already as the bytes of their frames, many to a buffer; large ones as the memory
//! they lie in. Bounded by bytes. Callers put in, one thread takes out (`thread.rs`), and either waits for the other here.

mod thread;

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pdkv_core::pipe::{ItemHead, Strided};
use pdkv_core::{Error, Result};
use pdkv_device::{EventFd, HostRegion};

use super::{PipeStats, closed_here};

/// Frames of small items in one buffer: what one system call sends.
const CHUNK: usize = 256 << 10;
/// What may wait of headers and tags, which no limit of the caller counts.
const MAX_OVERHEAD: u64 = 64 << 20;
/// Buffers kept for the next items.
const SPARE: usize = 4;

/// Small items, as they go out.
#[derive(Default)]
pub(in crate::pipe) struct Chunk {
    pub(in crate::pipe) bytes: Vec<u8>,
    payload: u64,
    overhead: u64,
}

/// A large item.
pub(in crate::pipe) struct Large {
    /// Its frame, which is sent before its bytes have a place.
    pub(in crate::pipe) frame: Vec<u8>,
    pub(in crate::pipe) seq: u64,
    pub(in crate::pipe) memory: Arc<HostRegion>,
    pub(in crate::pipe) at: Strided,
}

enum Entry {
    Small(Chunk),
    Large(Large),
}

/// What the thread is to do.
pub(in crate::pipe) enum Next {
    Send(Chunk),
    Place(Large),
    /// Everything is in the receiver's hands, and the caller has closed.
    Bye {
        items: u64,
    },
    /// Sleep until the event says that there is more.
    Rest,
    /// Stop: it failed or was given up.
    Over,
}

pub(in crate::pipe) struct Queue {
    state: Mutex<State>,
    /// For callers: room, receipts and the end.
    changed: Condvar,
    /// For the thread.
    pub(in crate::pipe) wake: EventFd,
    limit: u64,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Thread {
    #[default]
    Works,
    /// It sleeps, or is about to.
    Rests,
    Ended,
}

#[derive(Default)]
struct State {
    entries: VecDeque<Entry>,
    spare: Vec<Vec<u8>>,
    payload: u64,
    overhead: u64,
    accepted: u64,
    received: u64,
    thread: Thread,
    waiting: usize,
    closing: bool,
    failure: Option<Error>,
    /// Why the thread is to end, once it has heard what the receiver said last.
    cut: Option<Error>,
    /// A caller has heard of the failure.
    told: bool,
    stats: PipeStats,
}

impl State {
    fn check(&mut self) -> Result<()> {
        if let Some(error) = self.failure.as_ref().or(self.cut.as_ref()) {
            self.told = true;
            return Err(error.clone());
        }
        if self.closing {
            return Err(closed_here("send"));
        }
        Ok(())
    }

    /// The buffer that a frame of about `more` bytes goes into.
    fn tail(&mut self, more: usize) -> &mut Chunk {
        let fits = |entry: &Entry| matches!(entry, Entry::Small(chunk) if chunk.bytes.len() + more <= CHUNK);
        if !self.entries.back().is_some_and(fits) {
            let bytes = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(CHUNK));
            self.entries.push_back(Entry::Small(Chunk {
                bytes,
                ..Chunk::default()
            }));
        }
        match self.entries.back_mut() {
            Some(Entry::Small(chunk)) => chunk,
            _ => unreachable!("one was pushed above"),
        }
    }
}

impl Queue {
    pub(in crate::pipe) fn new(limit: u64) -> Result<Self> {
        Ok(Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            wake: EventFd::new()?,
            limit,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// Waits until `ready` says something, no longer than `wait`.
    fn wait<T>(
        &self,
        wait: Duration,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>>,
    ) -> Result<Option<(MutexGuard<'_, State>, T)>> {
        let mut state = self.lock();
        let mut deadline = None;
        loop {
            if let Some(found) = ready(&mut state)? {
                return Ok(Some((state, found)));
            }
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + wait);
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            state.waiting += 1;
            state = self.changed.wait_timeout(state, left).expect("no holder panics").0;
            state.waiting -= 1;
        }
    }

    fn room(&self, wait: Duration) -> Result<Option<MutexGuard<'_, State>>> {
        let found = self.wait(wait, |state| {
            state.check()?;
            let full = state.payload > self.limit || state.overhead > MAX_OVERHEAD;
            Ok((!full).then_some(()))
        })?;
        Ok(found.map(|(state, ())| state))
    }

    /// Queues an item whose bytes are copied now, by `fill`; `false` when there was no room in time.
    pub(in crate::pipe) fn push_small(
        &self,
        mut head: ItemHead<'_>,
        wait: Duration,
        fill: &dyn Fn(&mut [u8]) -> Result<()>,
    ) -> Result<bool> {
        let Some(mut state) = self.room(wait)? else {
            return Ok(false);
        };
        head.seq = state.accepted;
        let payload = head.tensor.map_or(0, |tensor| tensor.nbytes);
        let chunk = state.tail(head.tag.len() + payload as usize + 64);
        let start = chunk.bytes.len();
        head.begin(&mut chunk.bytes, head.tensor.is_some())?;
        let at = chunk.bytes.len();
        chunk.bytes.resize(at + payload as usize, 0);
        if let Err(error) = fill(&mut chunk.bytes[at..]) {
            chunk.bytes.truncate(start);
            return Err(error);
        }
        let overhead = (at - start) as u64;
        chunk.payload += payload;
        chunk.overhead += overhead;
        state.stats.inline_bytes += payload;
        self.accept(state, payload, overhead);
        Ok(true)
    }

    /// Queues an item whose bytes stay where they are; `false` when there was no room in time.
    pub(in crate::pipe) fn push_large(
        &self,
        mut head: ItemHead<'_>,
        memory: &Arc<HostRegion>,
        at: &Strided,
        wait: Duration,
    ) -> Result<bool> {
        let Some(mut state) = self.room(wait)? else {
            return Ok(false);
        };
        head.seq = state.accepted;
        let mut frame = Vec::new();
        head.begin(&mut frame, false)?;
        let overhead = frame.len() as u64;
        state.entries.push_back(Entry::Large(Large {
            frame,
            seq: head.seq,
            memory: Arc::clone(memory),
            at: at.clone(),
        }));
        self.accept(state, at.nbytes(), overhead);
        Ok(true)
    }

    fn accept(&self, mut state: MutexGuard<'_, State>, payload: u64, overhead: u64) {
        state.payload += payload;
        state.overhead += overhead;
        state.accepted += 1;
        state.stats.items += 1;
        state.stats.bytes += payload;
        // A thread that is at work looks here again before it rests.
        let rests = state.thread == Thread::Rests;
        if rests {
            state.thread = Thread::Works;
        }
        drop(state);
        if rests {
            self.wake.notify();
        }
    }

    fn tell(&self, state: MutexGuard<'_, State>) {
        if state.waiting > 0 {
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Ends it with an error, unless it has ended; what waits is let go.
    pub(in crate::pipe) fn fail(&self, error: Error) {
        let mut state = self.lock();
        if state.thread != Thread::Ended {
            state.failure.get_or_insert(error);
        }
        let dropped = std::mem::take(&mut state.entries);
        (state.payload, state.overhead) = (0, 0);
        drop(state);
        self.changed.notify_all();
        self.wake.notify();
        drop(dropped);
    }

    /// Has the thread end with an error, after it has heard what the receiver said last: that may be a receipt.
    pub(in crate::pipe) fn cut(&self, error: &Error) {
        self.lock().cut.get_or_insert_with(|| error.clone());
        // Who waits for room needs no receipt.
        self.changed.notify_all();
        self.wake.notify();
    }

    /// Takes no more items; the thread says goodbye when the receiver has all of them.
    pub(in crate::pipe) fn close(&self) {
        self.lock().closing = true;
        self.wake.notify();
    }

    /// Whether the receiver has the first `items`; `false` when it hadn't in time.
    pub(in crate::pipe) fn flushed(&self, items: u64, wait: Duration) -> Result<bool> {
        let found = self.wait(wait, |state| match &state.failure {
            _ if state.received >= items => Ok(Some(())),
            Some(error) => {
                state.told = true;
                Err(error.clone())
            }
            None => Ok(None),
        })?;
        Ok(found.is_some())
    }

    /// Whether the thread has ended; what it failed of is told once.
    pub(in crate::pipe) fn closed(&self, wait: Duration) -> Result<bool> {
        let found = self.wait(wait, |state| {
            let lost = state.received < state.accepted;
            match &state.failure {
                Some(error) if lost && !state.told => {
                    state.told = true;
                    Err(error.clone())
                }
                _ => Ok((state.thread == Thread::Ended).then_some(())),
            }
        })?;
        Ok(found.is_some())
    }

    pub(in crate::pipe) fn failure(&self) -> Option<Error> {
        self.lock().failure.clone()
    }

    /// Whether items are taken.
    pub(in crate::pipe) fn is_open(&self) -> bool {
        let state = self.lock();
        state.failure.is_none() && state.cut.is_none() && !state.closing
    }

    pub(in crate::pipe) fn queued(&self) -> u64 {
        self.lock().payload
    }

    pub(in crate::pipe) fn accepted(&self) -> u64 {
        self.lock().accepted
    }

    pub(in crate::pipe) fn stats(&self) -> PipeStats {
        self.lock().stats
    }
}
