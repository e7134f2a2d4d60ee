//! Gather from pages into a stream socket, scatter from a stream socket into pages.

use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};

use pdkv_core::{Error, ErrorKind, Result};
use rustix::io::Errno;

use crate::iov::PieceList;
use crate::os::last_errno;
use crate::region::{HostRegion, read_only};
use crate::stream::{Stop, closed, stopped, stream_error, wait_ready};

/// The most ranges one batch takes; one less than the kernel's `IOV_MAX`, so that a header fits.
pub const IO_MAX_PIECES: usize = 1023;

/// Ranges of regions to be sent or received in order; neighbours merge.
#[derive(Debug, Default)]
pub struct IoBatch<'a> {
    pieces: PieceList,
    bytes: u64,
    any_read_only: bool,
    regions: PhantomData<&'a HostRegion>,
}

impl<'a> IoBatch<'a> {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty batch for other regions, in the memory of this one.
    #[must_use]
    pub fn recycle<'b>(mut self) -> IoBatch<'b> {
        self.clear();
        IoBatch {
            pieces: self.pieces,
            bytes: 0,
            any_read_only: false,
            regions: PhantomData,
        }
    }

    /// Adds one range; `true` when the batch is full and must be moved before the next push.
    ///
    /// # Errors
    /// `Region` when the range does not lie inside, `Capacity` when the batch was full already.
    #[inline]
    pub fn push(&mut self, region: &'a HostRegion, offset: u64, len: u64) -> Result<bool> {
        let base = region.source("io", offset, len)?.expose_provenance();
        if len == 0 {
            return Ok(self.is_full());
        }
        if self.is_full() && !self.pieces.continues(base) {
            return Err(Error::new(ErrorKind::Capacity, "io", "the batch is full"));
        }
        self.pieces.push(base, len as usize);
        self.bytes += len;
        self.any_read_only |= !region.writable();
        Ok(self.is_full())
    }

    /// The bytes in the batch.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The ranges in the batch after merging.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Whether nothing is in the batch.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    fn is_full(&self) -> bool {
        self.pieces.len() >= IO_MAX_PIECES
    }

    /// Forgets all ranges.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.bytes = 0;
        self.any_read_only = false;
    }

    /// Sends `header` and then every range, and empties the batch, also on failure. Blocks until the
    /// kernel has taken all bytes; `stop` is looked at whenever the socket makes us wait, see
    /// [`configure_stream`](crate::configure_stream).
    ///
    /// # Errors
    /// `TransferCancelled` when stopped, `PeerLost` when the connection ended: the stream is cut inside a
    /// message then and must be closed.
    pub fn send_all(&mut self, fd: BorrowedFd<'_>, header: &[u8], stop: &dyn Stop) -> Result<u64> {
        let total = header.len() as u64 + self.bytes;
        let mut list = std::mem::take(&mut self.pieces);
        let mut sent_header = 0;
        let result = drive("send", fd, total, stop, libc::POLLOUT, || {
            send_step(fd, header, &mut sent_header, &mut list)
        });
        self.pieces = list;
        self.clear();
        result
    }

    /// Receives every range and empties the batch, also on failure. Blocks until all bytes are here;
    /// `stop` is looked at as in [`send_all`](Self::send_all).
    ///
    /// # Errors
    /// `TransferCancelled` when stopped, `PeerLost` when the stream ended early, `Region` when a range is
    /// read-only.
    pub fn recv_all(&mut self, fd: BorrowedFd<'_>, stop: &dyn Stop) -> Result<u64> {
        if self.any_read_only {
            self.clear();
            return Err(read_only("receive"));
        }
        let mut list = std::mem::take(&mut self.pieces);
        let result = drive("receive", fd, self.bytes, stop, libc::POLLIN, || {
            recv_step(fd, &mut list)
        });
        self.pieces = list;
        self.clear();
        result
    }
}

/// Runs `step` until it has moved `total` bytes.
fn drive(
    operation: &'static str,
    fd: BorrowedFd<'_>,
    total: u64,
    stop: &dyn Stop,
    event: libc::c_short,
    mut step: impl FnMut() -> Result<usize, Errno>,
) -> Result<u64> {
    let mut moved = 0;
    while moved < total {
        if stop.stopped() {
            return Err(stopped(operation, moved, total));
        }
        match step() {
            Ok(0) => return Err(closed(operation, moved, total)),
            Ok(bytes) => moved += bytes as u64,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_ready(fd, event),
            Err(errno) => return Err(stream_error(operation, errno).with("bytes_moved", moved)),
        }
    }
    Ok(moved)
}

fn send_step(fd: BorrowedFd<'_>, header: &[u8], sent_header: &mut usize, list: &mut PieceList) -> Result<usize, Errno> {
    let mut with_header;
    let (pieces, count) = if *sent_header < header.len() {
        // Once per batch: the ranges behind the header, in a list that lives as long as the call.
        let rest = &header[*sent_header..];
        with_header = PieceList::default();
        with_header.push(rest.as_ptr().expose_provenance(), rest.len());
        with_header.extend_from(list);
        with_header.rest()
    } else {
        list.rest()
    };
    let sent = send_pieces(fd, pieces, count)?;
    let of_header = sent.min(header.len() - *sent_header);
    *sent_header += of_header;
    list.advance(sent - of_header);
    Ok(sent)
}

fn message(pieces: *const libc::iovec, count: usize) -> libc::msghdr {
    // SAFETY: all fields are integers and pointers, for which zero is a value (and padding on musl).
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.cast_mut();
    message.msg_iovlen = count as _;
    message
}

fn send_pieces(fd: BorrowedFd<'_>, pieces: *const libc::iovec, count: usize) -> Result<usize, Errno> {
    let message = message(pieces, count);
    // SAFETY: `message` points at `count` ranges of a live list, each inside a region that the batch's
    // lifetime keeps alive or inside the header; sending only reads them.
    let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| last_errno())
}

fn recv_step(fd: BorrowedFd<'_>, list: &mut PieceList) -> Result<usize, Errno> {
    let (pieces, count) = list.rest();
    let mut message = message(pieces, count);
    // SAFETY: `message` points at `count` ranges of a live list, each inside a writable region (checked in
    // `recv_all`) that the batch's lifetime keeps alive.
    let received = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_WAITALL) };
    let received = usize::try_from(received).map_err(|_| last_errno())?;
    list.advance(received);
    Ok(received)
}
