//! Telling event loops that transfers ended. Whoever asks gets a queue of ids of its own and an event fd that is readable while
//! that queue isn't empty, so that nobody takes what another waits for. An engine that nobody asks keeps nothing.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pdkv_core::id::TransferId;
use pdkv_core::{Error, ErrorKind, Result};
use rustix::event::{EventfdFlags, eventfd};

/// How many ids wait for a caller that has stopped looking; then the oldest go.
const MAX_ENDED: usize = 1 << 16;

/// The transfers of an engine that end from now on, for one who looks: its descriptor is readable while there are any to take.
pub struct Completions(Arc<Queue>);

struct Queue {
    fd: OwnedFd,
    ended: Mutex<VecDeque<TransferId>>,
    /// A forked child shares the descriptor, but gets no ids.
    process: u32,
}

impl Queue {
    fn push(&self, transfer: TransferId) {
        let mut ended = self.ended.lock().expect("no holder panics");
        if ended.len() == MAX_ENDED {
            ended.pop_front();
        }
        ended.push_back(transfer);
        if ended.len() == 1 {
            // The counter can't overflow: it is written only when the queue was empty.
            let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        }
    }
}

impl Completions {
    /// The transfers that ended since the last call, oldest first (the last 65,536 of them); the descriptor is no longer readable
    /// then. Empty in a forked child, which would take the news from its parent.
    pub fn take(&self) -> Vec<TransferId> {
        if self.0.process != std::process::id() {
            return Vec::new();
        }
        let mut ended = self.0.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = rustix::io::read(&self.0.fd, &mut [0_u8; 8]);
        std::mem::take(&mut *ended).into()
    }
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
pub(crate) struct Watchers(Mutex<Vec<Weak<Queue>>>);

impl Watchers {
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
        let mut all = self.0.lock().expect("no holder panics");
        all.retain(|watcher| watcher.strong_count() > 0);
        all.push(Arc::downgrade(&queue));
        Ok(Completions(queue))
    }

    /// Tells everybody of an ended transfer.
    pub(crate) fn push(&self, transfer: TransferId) {
        let all = self.0.lock().expect("no holder panics");
        all.iter()
            .filter_map(Weak::upgrade)
            .for_each(|queue| queue.push(transfer));
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
        let taken = completions.take();
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
        assert_eq!(one.take(), [TransferId(1)]);
        assert!(readable(&other) && !readable(&one));
        assert_eq!(other.take(), [TransferId(1)]);
        drop(one);
        watchers.push(TransferId(2));
        assert_eq!(other.take(), [TransferId(2)]);
        let _third = watchers.add().unwrap();
        assert_eq!(watchers.0.lock().unwrap().len(), 2, "whoever left is forgotten");
    }
}
