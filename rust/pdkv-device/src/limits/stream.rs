//! The raw `sendmsg` and `readv` loops over stream sockets, one thread a stream.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use pdkv_core::Result;
use rustix::io::Errno;

use super::{BATCH, timed};
use crate::iov::PieceList;
use crate::os::last_errno;
use crate::region::HostRegion;
use crate::stream::{closed, stream_error, wait_ready};

/// Sends blocks of a region, each stream an equal consecutive part of the list, and tells how long it took.
///
/// # Errors
/// `Region` when a block does not lie inside, `Config` without a stream, `PeerLost` when one ends.
pub fn stream_send(
    streams: &[BorrowedFd<'_>],
    region: &HostRegion,
    offsets: &[u64],
    block_bytes: u64,
) -> Result<Duration> {
    const OPERATION: &str = "limit_send";
    for &offset in offsets {
        region.source(OPERATION, offset, block_bytes)?;
    }
    run(
        OPERATION,
        streams,
        region,
        offsets,
        block_bytes,
        libc::POLLOUT,
        |fd, list| {
            let (pieces, count) = list.rest();
            // SAFETY: all fields are integers and pointers, for which zero is a value.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = pieces.cast_mut();
            message.msg_iovlen = count as _;
            // SAFETY: the list holds ranges of the live region, checked above; they are only read.
            unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) }
        },
    )
}

/// Receives blocks into a region, each stream an equal consecutive part of the list.
///
/// # Errors
/// As [`stream_send`], and `Region` for a read-only region.
pub fn stream_recv(
    streams: &[BorrowedFd<'_>],
    region: &HostRegion,
    offsets: &[u64],
    block_bytes: u64,
) -> Result<Duration> {
    const OPERATION: &str = "limit_recv";
    for &offset in offsets {
        region.target(OPERATION, offset, block_bytes)?;
    }
    run(
        OPERATION,
        streams,
        region,
        offsets,
        block_bytes,
        libc::POLLIN,
        |fd, list| {
            let (pieces, count) = list.rest();
            let count = libc::c_int::try_from(count).unwrap_or(0);
            // SAFETY: the list holds ranges of the live writable region, checked above.
            unsafe { libc::readv(fd.as_raw_fd(), pieces, count) }
        },
    )
}

fn run(
    operation: &'static str,
    streams: &[BorrowedFd<'_>],
    region: &HostRegion,
    offsets: &[u64],
    block_bytes: u64,
    event: libc::c_short,
    call: impl Fn(BorrowedFd<'_>, &PieceList) -> libc::ssize_t + Sync,
) -> Result<Duration> {
    let base = region.address() as usize;
    timed(operation, offsets.len(), streams.len(), |index, part| {
        let mut list = PieceList::default();
        for blocks in offsets[part].chunks(BATCH) {
            list.clear();
            for &offset in blocks {
                list.push_apart(base + offset as usize, block_bytes as usize);
            }
            let total = block_bytes * blocks.len() as u64;
            let mut moved = 0;
            while moved < total {
                match usize::try_from(call(streams[index], &list)).map_err(|_| last_errno()) {
                    Ok(0) => return Err(closed(operation, moved, total)),
                    Ok(step) => {
                        list.advance(step);
                        moved += step as u64;
                    }
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => wait_ready(streams[index], event),
                    Err(errno) => return Err(stream_error(operation, errno)),
                }
            }
        }
        Ok(())
    })
}
