//! The queue as the pipe's thread uses it.

use pdkv_core::{Error, ErrorKind, Result};

use super::{CHUNK, Chunk, Entry, Large, Next, Queue, SPARE, Thread};

impl Queue {
    /// What the thread does next.
    pub(in crate::pipe) fn next(&self) -> Next {
        let mut state = self.lock();
        if state.failure.is_some() || state.cut.is_some() {
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
    pub(in crate::pipe) fn rise(&self) {
        self.wake.drain();
        self.lock().thread = Thread::Works;
    }

    /// A buffer went out.
    pub(in crate::pipe) fn sent(&self, mut chunk: Chunk) {
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
    pub(in crate::pipe) fn placed(&self, large: Large, staged: u64) {
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
    pub(in crate::pipe) fn received(&self, items: u64) -> Result<()> {
        let mut state = self.lock();
        if items > state.accepted || items < state.received {
            let text = format!("the receiver says it has `{items}` items of `{}`", state.accepted);
            return Err(Error::new(ErrorKind::Integrity, "pipe", text));
        }
        state.received = items;
        self.tell(state);
        Ok(())
    }

    /// The thread has ended.
    pub(in crate::pipe) fn set_over(&self) {
        self.lock().thread = Thread::Ended;
        self.changed.notify_all();
    }

    /// Why the thread is to end.
    pub(in crate::pipe) fn cut_error(&self) -> Option<Error> {
        self.lock().cut.clone()
    }

    /// Whether the receiver lacks items.
    pub(in crate::pipe) fn owes(&self) -> bool {
        let state = self.lock();
        state.received < state.accepted
    }
}
