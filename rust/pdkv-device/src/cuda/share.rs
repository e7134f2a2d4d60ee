//! How the memory of a region is named to another process: the allocations under it, and where in them its bytes are.
//!
//! CUDA IPC names memory of `cudaMalloc`, a descriptor or a fabric handle names an allocation of the driver's virtual memory. Either way the
//! whole allocation is given away, to whoever holds the handle.

use std::os::fd::OwnedFd;

use pdkv_core::{Error, ErrorKind, Result};

use super::ipc::IpcHandle;
use super::numbers as n;
use super::region::{DeviceRegion, Piece, pieces};
use super::verdict::judged;
use super::vmm::Allocation;

/// The name of an allocation.
#[derive(Debug)]
pub enum Handle {
    /// Of CUDA IPC, for processes of this host.
    Ipc([u8; 64]),
    /// A descriptor, to be passed over a Unix socket.
    Fd(OwnedFd),
    /// Of the fabric that connects the GPUs, for processes of any host on it.
    Fabric([u8; 64]),
}

/// The part of a region that lies in one allocation.
#[derive(Debug)]
pub struct SharedExtent {
    /// Where in the region it begins.
    pub region_offset: u64,
    /// Bytes.
    pub len: u64,
    /// Where in the allocation it begins.
    pub offset: u64,
    /// Bytes of the allocation.
    pub allocation_len: u64,
    /// The allocation.
    pub handle: Handle,
}

impl DeviceRegion {
    /// The extents of the region, in order and without gaps, for a process of this host to map. Every descriptor is a new one: a region of many
    /// allocations is better shared by [`share_from`](Self::share_from).
    ///
    /// # Errors
    /// `Unsupported` or `Region` when it cannot be shared and never will be, `Device` when a call of the driver failed that may go well another time.
    pub fn share(&self) -> Result<Vec<SharedExtent>> {
        self.share_from(0, usize::MAX)
    }

    /// At most `count` extents, from the one on that holds the region's byte at `offset`. The first begins there; what the last reaches is where
    /// the next call begins.
    ///
    /// # Errors
    /// As [`share`](Self::share).
    pub fn share_from(&self, offset: u64, count: usize) -> Result<Vec<SharedExtent>> {
        if self.of_another_process() {
            return Err(refuse("the memory is another process's, which shares it itself"));
        }
        if offset >= self.len() {
            let message = format!("the region has `{}` bytes, none at `{offset}`", self.len());
            return Err(Error::new(ErrorKind::Region, SHARE, message));
        }
        let start = self.address() + offset;
        let pieces = pieces(self.gpu(), start, self.len() - offset, count.max(2))?;
        if pieces.len() > 1 && pieces.iter().any(|piece| piece.ipc) {
            return Err(refuse("the memory lies in several allocations of `cudaMalloc`"));
        }
        let end = self.address() + self.len();
        pieces
            .iter()
            .take(count)
            .map(|piece| {
                let from = start.max(piece.base);
                Ok(SharedExtent {
                    region_offset: from - self.address(),
                    len: end.min(piece.base + piece.len) - from,
                    offset: from - piece.base,
                    allocation_len: piece.len,
                    handle: self.name(*piece)?,
                })
            })
            .collect()
    }

    fn name(&self, piece: Piece) -> Result<Handle> {
        let context = self.gpu().context();
        if piece.ipc {
            return IpcHandle::of(context, piece.base)
                .map(|handle| Handle::Ipc(handle.0))
                .map_err(judged);
        }
        let allocation = Allocation::mapped_at(context, piece.base).map_err(|error| match judged(error) {
            error if error.kind() == ErrorKind::Unsupported => refuse(&format!(
                "neither CUDA IPC nor a descriptor names the memory, which may be of a memory pool of `cudaMallocAsync`: {}",
                error.message()
            )),
            error => error,
        })?;
        let types = allocation.handle_types().map_err(judged)?;
        if types & n::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0 {
            return allocation.export_fd().map(Handle::Fd).map_err(judged);
        }
        if types & n::CU_MEM_HANDLE_TYPE_FABRIC != 0 {
            return allocation.export_fabric().map(Handle::Fabric).map_err(judged);
        }
        Err(refuse(
            "whoever allocated the memory did not ask for it to be shared: neither a descriptor nor a fabric handle",
        ))
    }
}

const SHARE: &str = "share GPU memory";

fn refuse(reason: &str) -> Error {
    Error::new(ErrorKind::Unsupported, SHARE, reason)
}
