//! Vectored copies between a region here and the memory of another process, by the kernel.
//!
//! The local side is always a region and an offset. Only the remote side is a bare address, and it is
//! used nowhere but in the other process, where a wrong one is an error and not a fault.

use std::marker::PhantomData;

use pdkv_core::{Error, ErrorKind, Result};
use rustix::io::Errno;

use crate::iov::PieceList;
use crate::os::last_errno;
use crate::process::Process;
use crate::region::{HostRegion, read_only};

/// The most spans one call takes on each side (the kernel's `UIO_MAXIOV`).
pub const CMA_MAX_SPANS: usize = 1024;

/// Up to [`CMA_MAX_SPANS`] spans for one call; spans that touch their predecessor merge with it, on each
/// side independently of the other.
///
/// A batch belongs to one thread; several threads use one each, on the same [`Process`].
#[derive(Debug, Default)]
pub struct CmaBatch<'a> {
    local: PieceList,
    remote: PieceList,
    bytes: u64,
    any_read_only: bool,
    regions: PhantomData<&'a HostRegion>,
}

#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write,
}

impl<'a> CmaBatch<'a> {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty batch for other regions, in the memory of this one.
    #[must_use]
    pub fn recycle<'b>(mut self) -> CmaBatch<'b> {
        self.clear();
        CmaBatch {
            local: self.local,
            remote: self.remote,
            bytes: 0,
            any_read_only: false,
            regions: PhantomData,
        }
    }

    /// Adds one span; `true` when the batch is full and must be moved before the next push.
    ///
    /// # Errors
    /// `Region` when the local range does not lie inside or the remote one is impossible, `Capacity` when
    /// the batch was full already.
    #[inline]
    pub fn push(&mut self, local: &'a HostRegion, offset: u64, remote_address: u64, len: u64) -> Result<bool> {
        let here = local.source("cma", offset, len)?.expose_provenance();
        if remote_address
            .checked_add(len)
            .is_none_or(|end| isize::try_from(end).is_err())
        {
            return Err(impossible(remote_address, len));
        }
        if len == 0 {
            return Ok(self.is_full());
        }
        let there = remote_address as usize;
        let room = |list: &PieceList, base| list.len() < CMA_MAX_SPANS || list.continues(base);
        if !room(&self.local, here) || !room(&self.remote, there) {
            return Err(Error::new(ErrorKind::Capacity, "cma", "the batch is full"));
        }
        self.local.push(here, len as usize);
        self.remote.push(there, len as usize);
        self.bytes += len;
        self.any_read_only |= !local.writable();
        Ok(self.is_full())
    }

    /// The bytes in the batch.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The spans in the batch after merging: the longer of the two sides.
    pub fn spans(&self) -> usize {
        self.local.len().max(self.remote.len())
    }

    /// Whether nothing is in the batch.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    fn is_full(&self) -> bool {
        self.spans() >= CMA_MAX_SPANS
    }

    /// Forgets all spans.
    pub fn clear(&mut self) {
        self.local.clear();
        self.remote.clear();
        self.bytes = 0;
        self.any_read_only = false;
    }

    /// Copies every span from the other process into the regions and empties the batch, also on failure.
    ///
    /// # Errors
    /// `PeerLost` when the process ended before or during the copy (what arrived must not be used),
    /// `Region` when an address isn't mapped there, `Unsupported` when the kernel refuses access. The
    /// context `bytes_moved` says how far it came.
    pub fn read(&mut self, process: &Process) -> Result<u64> {
        if self.any_read_only {
            self.clear();
            return Err(read_only("cma_read"));
        }
        self.run(process, Direction::Read)
    }

    /// Copies every span from the regions into the other process and empties the batch, also on failure.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(&mut self, process: &Process) -> Result<u64> {
        self.run(process, Direction::Write)
    }

    fn run(&mut self, process: &Process, direction: Direction) -> Result<u64> {
        let result = self.move_all(process, direction);
        self.clear();
        result
    }

    fn move_all(&mut self, process: &Process, direction: Direction) -> Result<u64> {
        let operation = match direction {
            Direction::Read => "cma_read",
            Direction::Write => "cma_write",
        };
        // A pid names its process for as long as that process isn't reaped, so alive before and alive after
        // means that the bytes are its own.
        if !process.alive() {
            return Err(process.lost(operation));
        }
        let mut moved = 0;
        while moved < self.bytes {
            let step = match self.call(process, direction) {
                Ok(step) if step > 0 => step,
                Err(Errno::INTR) => continue,
                Ok(_) | Err(Errno::FAULT) => {
                    return Err(self.not_mapped(process, operation).with("bytes_moved", moved));
                }
                Err(errno) => return Err(process.refused(operation, errno).with("bytes_moved", moved)),
            };
            self.local.advance(step);
            self.remote.advance(step);
            moved += step as u64;
        }
        if !process.alive() {
            return Err(process.lost(operation).with("bytes_moved", moved));
        }
        Ok(moved)
    }

    fn call(&self, process: &Process, direction: Direction) -> Result<usize, Errno> {
        let (local, local_count) = self.local.rest();
        let (remote, remote_count) = self.remote.rest();
        let (local_count, remote_count) = (local_count as libc::c_ulong, remote_count as libc::c_ulong);
        let pid = process.raw_pid();
        let moved = match direction {
            // SAFETY: the local ranges lie in regions that `'a` keeps alive, all of them writable (checked in
            // `read`); remote ones are only used in the other process.
            Direction::Read => unsafe { libc::process_vm_readv(pid, local, local_count, remote, remote_count, 0) },
            // SAFETY: as above, and nothing here is written.
            Direction::Write => unsafe { libc::process_vm_writev(pid, local, local_count, remote, remote_count, 0) },
        };
        usize::try_from(moved).map_err(|_| last_errno())
    }

    fn not_mapped(&self, process: &Process, operation: &'static str) -> Error {
        if !process.alive() {
            return process.lost(operation);
        }
        Error::new(
            ErrorKind::Region,
            operation,
            format!(
                "memory at `{:#x}` of process `{}` isn't mapped or not accessible",
                self.remote.next_address(),
                process.pid()
            ),
        )
    }
}

#[cold]
fn impossible(remote_address: u64, len: u64) -> Error {
    Error::new(
        ErrorKind::Region,
        "cma",
        format!("`{len}` bytes at the peer's `{remote_address:#x}` reach past the end of the address space"),
    )
}
