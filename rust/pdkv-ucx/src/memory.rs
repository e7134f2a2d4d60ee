//! A region of host memory known to a context: the handle that every copy passes, and the key for the peer.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::HostRegion;

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
    region: Arc<HostRegion>,
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
    pub(crate) fn map(context: &Context, region: &Arc<HostRegion>) -> Result<Arc<Self>> {
        fork::check("map memory")?;
        let mut params = ucp_mem_map_params_t::zeroed();
        params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS
            | UCP_MEM_MAP_PARAM_FIELD_LENGTH
            | UCP_MEM_MAP_PARAM_FIELD_PROT
            | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
        params.address = std::ptr::with_exposed_provenance_mut(region.address() as usize);
        params.length = region.len() as usize;
        params.prot = UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_REMOTE_READ;
        if region.writable() {
            params.prot |= UCP_MEM_MAP_PROT_LOCAL_WRITE | UCP_MEM_MAP_PROT_REMOTE_WRITE;
        }
        params.memory_type = UCS_MEMORY_TYPE_HOST;
        let mut handle = std::ptr::null_mut();
        log::take_last();
        let map = context.library().ucp().ucp_mem_map;
        // SAFETY: a live context; the range is a live region's, which this handle keeps until after the unmapping.
        let mapped = unsafe { map(context.handle(), &raw const params, &raw mut handle) };
        status::check("map memory", mapped).map_err(|error| {
            error
                .with("bytes", region.len())
                .with_hint("an RDMA adapter pins the memory: raise the limit of locked memory (`ulimit -l unlimited`)")
        })?;
        Ok(Arc::new(Self {
            handle,
            region: Arc::clone(region),
            context: context.clone(),
        }))
    }

    /// The region.
    pub fn region(&self) -> &Arc<HostRegion> {
        &self.region
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
        address_of(&self.region, operation, access, offset, len)
    }
}

/// The address of a checked range of a region.
#[inline]
fn address_of(
    region: &HostRegion,
    operation: &'static str,
    access: Access,
    offset: u64,
    len: u64,
) -> Result<*mut c_void> {
    if offset.checked_add(len).is_none_or(|end| end > region.len()) {
        return Err(outside(operation, offset, len, region.len()));
    }
    if access == Access::Write && !region.writable() {
        return Err(Error::new(ErrorKind::Region, operation, "the region is mapped to read"));
    }
    Ok(std::ptr::with_exposed_provenance_mut(
        (region.address() + offset) as usize,
    ))
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
    /// The region.
    pub fn region(&self) -> &Arc<HostRegion> {
        match self {
            Self::Mapped(handle) => handle.region(),
            Self::Plain(region) => region,
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
        address_of(self.memory.region(), operation, access, self.offset, self.len)
    }
}
