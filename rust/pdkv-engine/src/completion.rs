//! Telling event loops that transfers ended. Whoever asks gets a queue of ids of its own and an event fd that is readable while
//! that queue isn't empty, so that nobody takes what another waits for. An engine that nobody asks keeps nothing.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pdkv_core::id::TransferId;
use pdkv_core::{Error, ErrorKind, Result};
use rustix::event::{EventfdFlags, eventfd};

/// How many ids wait for a caller that has stopped looking; then the oldest go.
const MAX_ENDED: usize = 1 << 16;

/// The transfers of an engine that end from now on, for one who looks: its descriptor is readable while there are any to take.
pub struct Completions(Arc<Queue>);

struct Queue {
    fd: OwnedFd,
    ended: Mutex<Ended>,
    /// A forked child shares the descriptor, but gets no ids.
    process: u32,
}

#[derive(Default)]
struct Ended {
    ids: VecDeque<TransferId>,
    /// The engine is closed: there will be no more.
    last: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Ended> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, transfer: TransferId) {
        let mut ended = self.lock();
        if ended.ids.len() == MAX_ENDED {
            ended.ids.pop_front();
        }
        ended.ids.push_back(transfer);
        if ended.ids.len() == 1 && !ended.last {
            self.wake();
        }
    }

    fn close(&self) {
        let mut ended = self.lock();
        if !std::mem::replace(&mut ended.last, true) {
            self.wake();
        }
    }

    /// The descriptor is readable from now on. The counter can't overflow: it is written only when it was read or never before, and once more at the end.
    fn wake(&self) {
        let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
    }
}

impl Completions {
    /// The transfers that ended since the last call, oldest first (the last 65,536 of them); the descriptor is no longer readable
    /// then, unless the engine is closed: that it tells for good. Empty in a forked child, which would take the news from its parent.
    ///
    /// # Errors
    /// `Closed` when the engine is closed and all have been taken.
    pub fn take(&self) -> Result<Vec<TransferId>> {
        if self.0.process != std::process::id() {
            return Ok(Vec::new());
        }
        let mut ended = self.0.lock();
        if ended.last && ended.ids.is_empty() {
            return Err(closed("the engine is closed, and no more transfers will end"));
        }
        if !ended.last {
            let _ = rustix::io::read(&self.0.fd, &mut [0_u8; 8]);
        }
        Ok(std::mem::take(&mut ended.ids).into())
    }
}

fn closed(text: &str) -> Error {
    Error::new(ErrorKind::Closed, "completions", text)
}

impl AsFd for Completions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

impl fmt::Debug for Completions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Completions").field(&self.0.fd).finish()
    }
}

/// All who look at the transfers of one engine.
#[derive(Default)]
pub(crate) struct Watchers(Mutex<Book>);

#[derive(Default)]
struct Book {
    all: Vec<Weak<Queue>>,
    closed: bool,
}

impl Watchers {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().expect("no holder panics")
    }

    /// One more.
    pub(crate) fn add(&self) -> Result<Completions> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
            Error::new(ErrorKind::Capacity, "completions", "no event fd can be made")
                .with_source(std::io::Error::from(error))
        })?;
        let queue = Arc::new(Queue {
            fd,
            ended: Mutex::default(),
            process: std::process::id(),
        });
        let mut book = self.book();
        if book.closed {
            return Err(closed("the engine is closed"));
        }
        book.all.retain(|watcher| watcher.strong_count() > 0);
        book.all.push(Arc::downgrade(&queue));
        Ok(Completions(queue))
    }

    /// Tells everybody of an ended transfer.
    pub(crate) fn push(&self, transfer: TransferId) {
        for queue in self.book().all.iter().filter_map(Weak::upgrade) {
            queue.push(transfer);
        }
    }

    /// Every transfer has ended, and no other will begin.
    pub(crate) fn close(&self) {
        let mut book = self.book();
        book.closed = true;
        for queue in book.all.iter().filter_map(Weak::upgrade) {
            queue.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, poll};

    fn readable(completions: &Completions) -> bool {
        let now = rustix::event::Timespec::default();
        poll(&mut [PollFd::new(completions, PollFlags::IN)], Some(&now)).unwrap() == 1
    }

    #[test]
    fn the_fd_tells_of_the_queue_which_is_bounded() {
        let watchers = Watchers::default();
        watchers.push(TransferId(1));
        let completions = watchers.add().unwrap();
        assert!(!readable(&completions), "what ended before anybody asked is not told");
        for id in 0..MAX_ENDED as u64 + 5 {
            watchers.push(TransferId(id));
        }
        assert!(readable(&completions));
        let taken = completions.take().unwrap();
        assert_eq!((taken.len(), taken[0]), (MAX_ENDED, TransferId(5)));
        assert!(!readable(&completions));
        watchers.push(TransferId(7));
        assert!(readable(&completions));
    }

    #[test]
    fn nobody_takes_what_another_waits_for() {
        let watchers = Watchers::default();
        let [one, other] = [watchers.add().unwrap(), watchers.add().unwrap()];
        watchers.push(TransferId(1));
        assert_eq!(one.take().unwrap(), [TransferId(1)]);
        assert!(readable(&other) && !readable(&one));
        assert_eq!(other.take().unwrap(), [TransferId(1)]);
        drop(one);
        watchers.push(TransferId(2));
        assert_eq!(other.take().unwrap(), [TransferId(2)]);
        let _third = watchers.add().unwrap();
        assert_eq!(watchers.book().all.len(), 2, "whoever left is forgotten");
    }

    #[test]
    fn what_ended_before_the_close_is_handed_out_once_and_the_loop_wakes() {
        let watchers = Watchers::default();
        let [one, idle] = [watchers.add().unwrap(), watchers.add().unwrap()];
        watchers.push(TransferId(1));
        assert_eq!(idle.take().unwrap(), [TransferId(1)]);
        assert!(!readable(&idle));
        watchers.close();
        assert!(readable(&idle) && readable(&one));
        assert_eq!(one.take().unwrap(), [TransferId(1)]);
        for completions in [&one, &idle] {
            assert!(readable(completions), "a loop that looks once more hears of the end");
            assert_eq!(completions.take().unwrap_err().kind(), ErrorKind::Closed);
            assert!(readable(completions));
        }
        assert_eq!(watchers.add().unwrap_err().kind(), ErrorKind::Closed);
    }
}
