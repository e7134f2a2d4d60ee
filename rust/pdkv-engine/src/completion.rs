//! Telling event loops that transfers ended: a queue of ids and an event fd that is readable while
//! the queue isn't empty. The fd exists only once somebody asked for it, so that an engine nobody
//! polls pays nothing per transfer.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use pdkv_core::id::TransferId;
use pdkv_core::{Error, ErrorKind, Result};
use rustix::event::{EventfdFlags, eventfd};

/// How many ids wait for a caller that once asked for the fd and has stopped looking; then the oldest go.
const MAX_ENDED: usize = 1 << 16;

#[derive(Default)]
pub(crate) struct Completions {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    fd: Option<OwnedFd>,
    ended: VecDeque<TransferId>,
}

impl Completions {
    /// The event fd, made at the first call. The caller gets a duplicate and owns it.
    pub(crate) fn fd(&self) -> Result<OwnedFd> {
        let fail = |error: std::io::Error| {
            Error::new(ErrorKind::Capacity, "completion_fd", "no event fd can be made").with_source(error)
        };
        let mut inner = self.inner.lock().expect("no holder panics");
        if inner.fd.is_none() {
            let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| fail(e.into()))?;
            inner.fd = Some(fd);
        }
        inner.fd.as_ref().expect("made above").try_clone().map_err(fail)
    }

    /// Records an ended transfer and makes the fd readable. Without an fd nothing is kept.
    pub(crate) fn push(&self, transfer: TransferId) {
        let mut inner = self.inner.lock().expect("no holder panics");
        if inner.fd.is_none() {
            return;
        }
        if inner.ended.len() == MAX_ENDED {
            inner.ended.pop_front();
        }
        inner.ended.push_back(transfer);
        if inner.ended.len() == 1
            && let Some(fd) = &inner.fd
        {
            // The counter can't overflow: it is written only when the queue was empty.
            let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
        }
    }

    /// The transfers that ended since the last call, oldest first (the last 65,536 of them); clears the fd.
    pub(crate) fn take(&self) -> Vec<TransferId> {
        let mut inner = self.inner.lock().expect("no holder panics");
        if let Some(fd) = &inner.fd {
            let _ = rustix::io::read(fd, &mut [0_u8; 8]);
        }
        std::mem::take(&mut inner.ended).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, poll};

    fn readable(fd: &OwnedFd) -> bool {
        let now = rustix::event::Timespec::default();
        poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&now)).unwrap() == 1
    }

    #[test]
    fn the_fd_tells_of_the_queue_which_is_bounded() {
        let completions = Completions::default();
        completions.push(TransferId(1));
        let fd = completions.fd().unwrap();
        assert!(!readable(&fd), "what ended before anybody asked is not told");
        for id in 0..MAX_ENDED as u64 + 5 {
            completions.push(TransferId(id));
        }
        assert!(readable(&fd));
        let taken = completions.take();
        assert_eq!((taken.len(), taken[0]), (MAX_ENDED, TransferId(5)));
        assert!(!readable(&fd));
        completions.push(TransferId(7));
        assert!(readable(&fd));
    }
}
