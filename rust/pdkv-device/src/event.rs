//! An event descriptor: readable when something happened since the last drain.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use pdkv_core::{ErrorKind, Result};
use rustix::event::{EventfdFlags, eventfd};

use crate::os::os_error;

/// A non-blocking eventfd, for poll loops here and for asyncio above.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Makes an unsignalled one.
    ///
    /// # Errors
    /// `Capacity` when the process has no descriptor left.
    pub fn new() -> Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .map_err(|errno| os_error(ErrorKind::Capacity, "eventfd", "no event descriptor", errno))
    }

    /// Makes it readable; never blocks (a counter at its limit is readable already).
    pub fn notify(&self) {
        let _ = rustix::io::retry_on_intr(|| rustix::io::write(&self.0, &1_u64.to_ne_bytes()));
    }

    /// Makes it unreadable and tells how often [`notify`](Self::notify) was called since; 0 for never.
    pub fn drain(&self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut count)) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }

    /// Another descriptor of the same event.
    ///
    /// # Errors
    /// `Capacity` when the process has no descriptor left.
    pub fn duplicate(&self) -> Result<OwnedFd> {
        rustix::io::fcntl_dupfd_cloexec(&self.0, 0)
            .map_err(|errno| os_error(ErrorKind::Capacity, "eventfd", "no descriptor for a duplicate", errno))
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn notify_makes_it_readable_until_drained() {
        let event = EventFd::new().unwrap();
        let copy = event.duplicate().unwrap();
        let readable = || {
            let mut fds = [PollFd::new(&copy, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
        };
        assert!(!readable());
        event.notify();
        event.notify();
        assert!(readable());
        assert_eq!((event.drain(), event.drain()), (2, 0));
        assert!(!readable());
    }
}
