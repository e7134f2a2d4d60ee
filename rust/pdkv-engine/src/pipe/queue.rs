//! What waits to be sent: small items already as the bytes of their frames, many to a buffer; large ones as the memory
//! they lie in. Bounded by bytes. Callers put in, one thread takes out, and either waits for the other here.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pdkv_core::pipe::{ItemHead, Strided};
use pdkv_core::{Error, ErrorKind, Result};
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
pub(super) struct Chunk {
    pub(super) bytes: Vec<u8>,
    payload: u64,
    overhead: u64,
}

/// A large item.
pub(super) struct Large {
    /// Its frame, which is sent before its bytes have a place.
    pub(super) frame: Vec<u8>,
    pub(super) seq: u64,
    pub(super) memory: Arc<HostRegion>,
    pub(super) at: Strided,
}

enum Entry {
    Small(Chunk),
    Large(Large),
}

/// What the thread is to do.
pub(super) enum Next {
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

pub(super) struct Queue {
    state: Mutex<State>,
    /// For callers: room, receipts and the end.
    changed: Condvar,
    /// For the thread.
    pub(super) wake: EventFd,
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
    /// A caller has heard of the failure.
    told: bool,
    stats: PipeStats,
}

impl State {
    fn check(&mut self) -> Result<()> {
        if let Some(error) = &self.failure {
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
    pub(super) fn new(limit: u64) -> Result<Self> {
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
    pub(super) fn push_small(
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
    pub(super) fn push_large(
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

    /// What the thread does next.
    pub(super) fn next(&self) -> Next {
        let mut state = self.lock();
        if state.failure.is_some() {
            return Next::Over;
        }
        match state.entries.pop_front() {
            Some(Entry::Small(chunk)) => Next::Send(chunk),
            Some(Entry::Large(large)) => Next::Place(large),
            None if state.closing && state.received == state.accepted => Next::Bye { items: state.accepted },
            None => {
                state.thread = Thread::Rests;
                Next::Rest
            }
        }
    }

    /// The thread is awake again.
    pub(super) fn rise(&self) {
        self.wake.drain();
        self.lock().thread = Thread::Works;
    }

    /// A buffer went out.
    pub(super) fn sent(&self, mut chunk: Chunk) {
        let mut state = self.lock();
        state.payload = state.payload.saturating_sub(chunk.payload);
        state.overhead = state.overhead.saturating_sub(chunk.overhead);
        if state.spare.len() < SPARE && chunk.bytes.capacity() <= 2 * CHUNK {
            chunk.bytes.clear();
            state.spare.push(chunk.bytes);
        }
        self.tell(state);
    }

    /// A large item is placed, `staged` bytes of it in two steps.
    pub(super) fn placed(&self, large: Large, staged: u64) {
        let mut state = self.lock();
        let bytes = large.at.nbytes();
        state.payload = state.payload.saturating_sub(bytes);
        state.overhead = state.overhead.saturating_sub(large.frame.len() as u64);
        state.stats.staged_bytes += staged;
        state.stats.direct_bytes += bytes - staged;
        self.tell(state);
        // Outside the lock: whoever keeps the memory alive may do anything when it is let go.
        drop(large);
    }

    /// The receiver says how many items it holds.
    pub(super) fn received(&self, items: u64) -> Result<()> {
        let mut state = self.lock();
        if items > state.accepted || items < state.received {
            let text = format!("the receiver says it has `{items}` items of `{}`", state.accepted);
            return Err(Error::new(ErrorKind::Integrity, "pipe", text));
        }
        state.received = items;
        self.tell(state);
        Ok(())
    }

    fn tell(&self, state: MutexGuard<'_, State>) {
        if state.waiting > 0 {
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Ends it with an error, unless it has ended; what waits is let go.
    pub(super) fn fail(&self, error: Error) {
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

    /// The thread has ended.
    pub(super) fn set_over(&self) {
        self.lock().thread = Thread::Ended;
        self.changed.notify_all();
    }

    /// Takes no more items; the thread says goodbye when the receiver has all of them.
    pub(super) fn close(&self) {
        self.lock().closing = true;
        self.wake.notify();
    }

    /// Whether the receiver has the first `items`; `false` when it hadn't in time.
    pub(super) fn flushed(&self, items: u64, wait: Duration) -> Result<bool> {
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
    pub(super) fn closed(&self, wait: Duration) -> Result<bool> {
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

    pub(super) fn failure(&self) -> Option<Error> {
        self.lock().failure.clone()
    }

    /// Whether items are taken.
    pub(super) fn is_open(&self) -> bool {
        let state = self.lock();
        state.failure.is_none() && !state.closing
    }

    pub(super) fn queued(&self) -> u64 {
        self.lock().payload
    }

    pub(super) fn accepted(&self) -> u64 {
        self.lock().accepted
    }

    pub(super) fn stats(&self) -> PipeStats {
        self.lock().stats
    }
}
