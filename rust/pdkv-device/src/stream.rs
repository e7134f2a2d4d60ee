//! What bulk and small messages share on a stream socket: waiting in slices, stopping, ending.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pdkv_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::os::os_error;

/// What ends a wait: looked at in between, by whoever waits.
pub trait Stop {
    /// Whether to wait no longer.
    fn stopped(&self) -> bool;
}

impl Stop for AtomicBool {
    fn stopped(&self) -> bool {
        self.load(Ordering::Relaxed)
    }
}

/// A deadline.
impl Stop for Instant {
    fn stopped(&self) -> bool {
        Self::now() >= *self
    }
}

/// How long a non-blocking socket is waited for before the stop flag is looked at again.
const WAIT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

/// Makes a socket ready for [`IoBatch`](crate::IoBatch): blocking, with waits that end after `slice` so
/// that the stop flag is seen. A blocking wait inside the kernel moves bytes as they come; a poll loop
/// would pay a second system call for each buffer.
///
/// # Errors
/// `Transfer` when the descriptor is no socket or `slice` is zero.
pub fn configure_stream(fd: BorrowedFd<'_>, slice: Duration) -> Result<()> {
    let failed = |errno| os_error(ErrorKind::Transfer, "configure_stream", "the socket refuses", errno);
    if slice.is_zero() {
        return Err(failed(Errno::INVAL));
    }
    rustix::io::ioctl_fionbio(fd, false).map_err(failed)?;
    set_socket_timeout(fd, Timeout::Recv, Some(slice)).map_err(failed)?;
    set_socket_timeout(fd, Timeout::Send, Some(slice)).map_err(failed)
}

/// Sends all of `bytes`.
///
/// # Errors
/// As [`IoBatch::send_all`](crate::IoBatch::send_all).
pub fn send_exact(fd: BorrowedFd<'_>, bytes: &[u8], stop: &dyn Stop) -> Result<()> {
    exact("send", fd, bytes.len(), stop, libc::POLLOUT, |at| {
        send(fd, &bytes[at..], SendFlags::NOSIGNAL)
    })
}

/// Fills `bytes` from the stream.
///
/// # Errors
/// As [`IoBatch::recv_all`](crate::IoBatch::recv_all).
pub fn recv_exact(fd: BorrowedFd<'_>, bytes: &mut [u8], stop: &dyn Stop) -> Result<()> {
    exact("receive", fd, bytes.len(), stop, libc::POLLIN, |at| {
        recv(fd, &mut bytes[at..], RecvFlags::WAITALL).map(|(_, received)| received)
    })
}

fn exact(
    operation: &'static str,
    fd: BorrowedFd<'_>,
    total: usize,
    stop: &dyn Stop,
    event: libc::c_short,
    mut step: impl FnMut(usize) -> Result<usize, Errno>,
) -> Result<()> {
    let mut moved = 0;
    while moved < total {
        if stop.stopped() {
            return Err(stopped(operation, moved as u64, total as u64));
        }
        match step(moved) {
            Ok(0) => return Err(closed(operation, moved as u64, total as u64)),
            Ok(bytes) => moved += bytes,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_ready(fd, event),
            Err(errno) => return Err(stream_error(operation, errno).with("bytes_moved", moved)),
        }
    }
    Ok(())
}

/// Waits a slice for the socket. Whatever poll says, the next call on the socket tells it too.
pub(crate) fn wait_ready(fd: BorrowedFd<'_>, event: libc::c_short) {
    let flags = PollFlags::from_bits_retain(event.cast_unsigned());
    let _ = poll(&mut [PollFd::from_borrowed_fd(fd, flags)], Some(&WAIT));
}

pub(crate) fn stopped(operation: &'static str, moved: u64, total: u64) -> Error {
    Error::new(
        ErrorKind::TransferCancelled,
        operation,
        format!("stopped after `{moved}` of `{total}` bytes"),
    )
}

pub(crate) fn closed(operation: &'static str, moved: u64, total: u64) -> Error {
    Error::new(
        ErrorKind::PeerLost,
        operation,
        format!("the stream ended after `{moved}` of `{total}` bytes"),
    )
}

pub(crate) fn stream_error(operation: &'static str, errno: Errno) -> Error {
    let kind = match errno {
        Errno::PIPE | Errno::CONNRESET | Errno::CONNABORTED | Errno::TIMEDOUT | Errno::NOTCONN | Errno::HOSTUNREACH => {
            ErrorKind::PeerLost
        }
        Errno::NOMEM | Errno::NOBUFS => ErrorKind::Capacity,
        _ => ErrorKind::Transfer,
    };
    os_error(kind, operation, "the stream failed", errno)
}
