//! Memory that a context knows, of the host or of a GPU: the handle that every copy passes, and the key for the peer.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::{HostRegion, Memory};

use crate::abi::constants::*;
use crate::abi::{Zeroed, ucp_mem_h, ucp_mem_map_params_t};
use crate::context::Context;
use crate::sealed::{self, Kind};
use crate::{fork, log, status};

/// A mapped region.
///
/// Drop order: the mapping is undone, then the region's memory may go, then the context.
pub struct MemoryHandle {
    handle: ucp_mem_h,
    region: Memory,
    context: Context,
}

// SAFETY: the handle is only read by UCX calls, and mapping and unmapping take the context's lock
// (`mt_workers_shared`); the other fields never change.
unsafe impl Send for MemoryHandle {}
// SAFETY: as for `Send`.
unsafe impl Sync for MemoryHandle {}

impl fmt::Debug for MemoryHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryHandle")
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

impl MemoryHandle {
    pub(crate) fn map(context: &Context, region: &Memory) -> Result<Arc<Self>> {
        fork::check("map memory")?;
        if region.device().is_some() && !context.knows_gpus() {
            return Err(no_gpus(context));
        }
        let mut params = ucp_mem_map_params_t::zeroed();
        params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS
            | UCP_MEM_MAP_PARAM_FIELD_LENGTH
            | UCP_MEM_MAP_PARAM_FIELD_PROT
            | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
        params.address = std::ptr::with_exposed_provenance_mut(region.address() as usize);
        params.length = region.len() as usize;
        params.prot = UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_REMOTE_READ;
        if Bounds::from(region).writable {
            params.prot |= UCP_MEM_MAP_PROT_LOCAL_WRITE | UCP_MEM_MAP_PROT_REMOTE_WRITE;
        }
        params.memory_type = memory_type(region);
        let mut handle = std::ptr::null_mut();
        log::take_last();
        let map = context.library().ucp().ucp_mem_map;
        let mut map = || {
            // SAFETY: a live context; the range is a live region's, which this handle keeps until after the unmapping.
            unsafe { map(context.handle(), &raw const params, &raw mut handle) }
        };
        // Some releases ask the driver about the memory in the thread's own context.
        let (mapped, hint) = match region {
            Memory::Host(_) => (map(), PINS),
            Memory::Device(device) => (device.gpu().inside(map)?, PINS_GPUS),
        };
        let outcome = status::check("map memory", mapped);
        outcome.map_err(|error| error.with("bytes", region.len()).with_hint(hint))?;
        Ok(Arc::new(Self {
            handle,
            region: region.clone(),
            context: context.clone(),
        }))
    }

    /// The memory.
    pub fn region(&self) -> &Memory {
        &self.region
    }

    /// What UCX calls its kind.
    pub(crate) fn memory_type(&self) -> u32 {
        memory_type(&self.region)
    }

    /// The key by which a peer reaches this memory, for `Endpoint::unpack` of the peer. It names memory domains
    /// and, with an adapter, its keys; the address and length travel beside it.
    ///
    /// # Errors
    /// Whatever UCX says; `Unsupported` in a forked child.
    pub fn pack(&self) -> Result<Vec<u8>> {
        fork::check("pack a key")?;
        let ucp = self.context.library().ucp();
        let mut buffer: *mut c_void = std::ptr::null_mut();
        let mut len = 0_usize;
        log::take_last();
        // `ucp_memh_pack`, which newer headers offer beside this, ends the process when asked for such a key.
        // SAFETY: a live context and its handle, two places of ours.
        let packed = unsafe { (ucp.ucp_rkey_pack)(self.context.handle(), self.handle, &raw mut buffer, &raw mut len) };
        status::check("pack a key", packed)?;
        // SAFETY: on success UCX gave a buffer of `len` bytes, untouched until it is released below.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.cast_const().cast::<u8>(), len) };
        let sealed = sealed::seal(Kind::Key, self.context.library().version(), bytes);
        // SAFETY: the buffer that UCX gave above, released once.
        unsafe { (ucp.ucp_rkey_buffer_release)(buffer) };
        sealed
    }

    pub(crate) fn handle(&self) -> ucp_mem_h {
        self.handle
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// The address of a checked range.
    #[inline]
    pub(crate) fn address_of(
        &self,
        operation: &'static str,
        access: Access,
        offset: u64,
        len: u64,
    ) -> Result<*mut c_void> {
        Bounds::from(&self.region).at(operation, access, offset, len)
    }
}

const PINS: &str = "an RDMA adapter pins the memory: raise the limit of locked memory (`ulimit -l unlimited`)";
const PINS_GPUS: &str = "an adapter reaches a GPU's memory by DMA-BUF or by the kernel module `nvidia-peermem`; `pdkv doctor` \
     says what is here";

fn memory_type(memory: &Memory) -> u32 {
    match memory {
        Memory::Host(_) => UCS_MEMORY_TYPE_HOST,
        Memory::Device(_) => UCS_MEMORY_TYPE_CUDA,
    }
}

fn no_gpus(context: &Context) -> Error {
    let version = context.library().version();
    let message = format!("UCX {version} has no transport here that knows memory of GPUs");
    Error::new(ErrorKind::Unsupported, "map memory", message)
        .with_hint("take a copy of UCX with CUDA, and leave `cuda_copy` in its `TLS`: `pdkv doctor` shows both")
}

/// Where memory is, and whether it may be written.
#[derive(Clone, Copy)]
struct Bounds {
    address: u64,
    len: u64,
    writable: bool,
}

impl From<&Memory> for Bounds {
    #[inline]
    fn from(memory: &Memory) -> Self {
        match memory {
            Memory::Host(region) => Self::from(&**region),
            Memory::Device(region) => Self {
                address: region.address(),
                len: region.len(),
                writable: true,
            },
        }
    }
}

impl From<&HostRegion> for Bounds {
    #[inline]
    fn from(region: &HostRegion) -> Self {
        Self {
            address: region.address(),
            len: region.len(),
            writable: region.writable(),
        }
    }
}

impl Bounds {
    /// The address of a checked range.
    #[inline]
    fn at(self, operation: &'static str, access: Access, offset: u64, len: u64) -> Result<*mut c_void> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(outside(operation, offset, len, self.len));
        }
        if access == Access::Write && !self.writable {
            return Err(Error::new(ErrorKind::Region, operation, "the region is mapped to read"));
        }
        Ok(std::ptr::with_exposed_provenance_mut((self.address + offset) as usize))
    }
}

/// What is about to be done to local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

#[cold]
pub(crate) fn outside(operation: &'static str, offset: u64, len: u64, whole: u64) -> Error {
    Error::new(
        ErrorKind::Region,
        operation,
        format!("`{len}` bytes at `{offset}` don't lie inside the `{whole}` bytes of the region"),
    )
}

impl Drop for MemoryHandle {
    fn drop(&mut self) {
        if fork::forked() {
            return;
        }
        // SAFETY: mapped once, and nothing is in flight: a tally keeps the handle until its callbacks came or
        // the worker is gone.
        unsafe { (self.context.library().ucp().ucp_mem_unmap)(self.context.handle(), self.handle) };
    }
}

/// The memory of a piece: known to the context, or not.
#[derive(Clone, Debug)]
pub enum PieceMemory {
    /// Mapped; UCX need not look it up.
    Mapped(Arc<MemoryHandle>),
    /// Plain host memory; where a transport wants it registered, UCX does that for the time being.
    Plain(Arc<HostRegion>),
}

impl PieceMemory {
    /// The memory, which is the host's.
    ///
    /// # Errors
    /// `Unsupported` for memory of a GPU: messages gather and scatter where a processor reaches.
    pub fn region(&self) -> Result<&Arc<HostRegion>> {
        match self {
            Self::Mapped(handle) => handle.region().host(),
            Self::Plain(region) => Ok(region),
        }
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Mapped(one), Self::Mapped(two)) => Arc::ptr_eq(one, two),
            (Self::Plain(one), Self::Plain(two)) => Arc::ptr_eq(one, two),
            _ => false,
        }
    }

    pub(crate) fn handle(&self) -> Option<&Arc<MemoryHandle>> {
        match self {
            Self::Mapped(handle) => Some(handle),
            Self::Plain(_) => None,
        }
    }
}

/// One piece of a scattered message.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The memory.
    pub memory: PieceMemory,
    /// Where in it the piece begins.
    pub offset: u64,
    /// How many bytes it has.
    pub len: u64,
}

impl Piece {
    pub(crate) fn address(&self, operation: &'static str, access: Access) -> Result<*mut c_void> {
        Bounds::from(&**self.memory.region()?).at(operation, access, self.offset, self.len)
    }
}
