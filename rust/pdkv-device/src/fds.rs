//! File descriptors over a Unix-domain stream socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use pdkv_core::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::os::os_error;
use crate::stream::{Stop, closed, stopped, stream_error, wait_ready};

/// The most descriptors in one message (the kernel's `SCM_MAX_FD`).
const MAX_FDS: usize = 253;

/// Sends descriptors with at least one byte beside them; blocks until all bytes are out. `stop` is looked at whenever the
/// socket makes us wait, see [`configure_stream`](crate::configure_stream).
///
/// # Errors
/// `Config` for no bytes or too many descriptors, `PeerLost` when nobody receives any more, `TransferCancelled` when stopped.
pub fn send_fds(socket: BorrowedFd<'_>, fds: &[BorrowedFd<'_>], bytes: &[u8], stop: &dyn Stop) -> Result<()> {
    const OPERATION: &str = "send_fds";
    if bytes.is_empty() || fds.len() > MAX_FDS {
        let message = format!(
            "a message takes at least one byte and at most {MAX_FDS} descriptors, not `{}` and `{}`",
            bytes.len(),
            fds.len()
        );
        return Err(Error::new(ErrorKind::Config, OPERATION, message));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut sent = 0;
    while sent < bytes.len() {
        if stop.stopped() {
            return Err(stopped(OPERATION, sent as u64, bytes.len() as u64));
        }
        let mut control = SendAncillaryBuffer::new(&mut space);
        // The descriptors ride with the first byte; what a short write leaves over goes alone.
        if sent == 0 && !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        match sendmsg(
            socket,
            &[IoSlice::new(&bytes[sent..])],
            &mut control,
            SendFlags::NOSIGNAL,
        ) {
            Ok(step) => sent += step,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_ready(socket, libc::POLLOUT),
            Err(Errno::TOOMANYREFS) => {
                return Err(os_error(
                    ErrorKind::Capacity,
                    OPERATION,
                    "too many descriptors in flight",
                    Errno::TOOMANYREFS,
                ));
            }
            Err(errno) => return Err(stream_error(OPERATION, errno)),
        }
    }
    Ok(())
}

/// Receives one piece of a message: how many bytes of `bytes` were filled (at least one) and the
/// descriptors that came with them, close-on-exec, `max_fds` at most. On a socket that doesn't wait it
/// returns `None` when nothing is there.
///
/// # Errors
/// `PeerLost` at the end of the stream, `Handshake` when the peer sent more descriptors than allowed
/// (they are closed), `Capacity` when this process has no number left for one of them, `Config` for an empty buffer.
pub fn recv_fds(socket: BorrowedFd<'_>, bytes: &mut [u8], max_fds: usize) -> Result<Option<(usize, Vec<OwnedFd>)>> {
    const OPERATION: &str = "recv_fds";
    if bytes.is_empty() || max_fds > MAX_FDS {
        return Err(Error::new(
            ErrorKind::Config,
            OPERATION,
            format!("a message takes at least one byte and at most {MAX_FDS} descriptors"),
        ));
    }
    // Room for the most the kernel ever delivers: only a lack of numbers truncates, and that is told.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let expected = bytes.len() as u64;
    let message = loop {
        match recvmsg(
            socket,
            &mut [IoSliceMut::new(bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(stream_error(OPERATION, errno)),
            Ok(message) => break message,
        }
    };
    let mut fds = Vec::new();
    for item in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = item {
            fds.extend(rights);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        let text = format!(
            "no descriptor is left: of those that came `{}` could be taken",
            fds.len()
        );
        return Err(
            Error::new(ErrorKind::Capacity, OPERATION, text).with_hint("raise the limit of open files (`ulimit -n`)")
        );
    }
    if fds.len() > max_fds {
        return Err(Error::new(
            ErrorKind::Handshake,
            OPERATION,
            format!(
                "the peer sent `{}` descriptors, at most `{max_fds}` are expected",
                fds.len()
            ),
        ));
    }
    if message.bytes == 0 {
        return Err(closed(OPERATION, 0, expected));
    }
    Ok(Some((message.bytes, fds)))
}
