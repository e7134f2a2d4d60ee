//! A range of host memory that pdkv may copy into and out of.
//!
//! A region never hands out a slice: other processes and other threads write the same bytes, so every
//! access is a bounds-checked copy by offset. Where the memory comes from is written in the sibling
//! files: `pool.rs` (allocated here, or mapped from a peer) and `adopt.rs` (moved in place).

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};

use crate::mapping::Mapping;
use crate::range::{check_inside, check_range};
use crate::registry;

/// Memory with a stable address and length; shared as `Arc<HostRegion>`.
///
/// Drop order: the region leaves the registry, then its mapping is unmapped (or, for foreign memory,
/// its keeper dropped), then the descriptor of the memfd is closed.
pub struct HostRegion {
    base: *mut u8,
    len: u64,
    writable: bool,
    serial: u64,
    backing: Backing,
    shared: Option<Shared>,
}

/// What keeps the bytes mapped.
pub(crate) enum Backing {
    /// Our own mapping, unmapped with the region.
    #[expect(dead_code, reason = "held for its drop")]
    Mapping(Mapping),
    /// Somebody else's memory; the keeper is dropped with the region.
    #[expect(dead_code, reason = "held for its drop")]
    Foreign(Box<dyn Any + Send + Sync>),
    /// The region this one is a part of.
    Whole(Arc<HostRegion>),
}

/// The part of a region that lives in a memfd: `len` bytes from the descriptor's `fd_offset` on lie at
/// `region_offset`.
pub(crate) struct Shared {
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) fd_offset: u64,
    pub(crate) region_offset: u64,
    pub(crate) len: u64,
}

/// The part of a region that a peer on this host can map.
#[derive(Clone, Copy, Debug)]
pub struct SharedPart<'a> {
    /// The sealed memfd; its byte at `fd_offset` is the region's byte at `region_offset`.
    pub fd: BorrowedFd<'a>,
    /// Where in the memfd the shared part begins: 0 unless the region is a [`part`](HostRegion::part).
    pub fd_offset: u64,
    /// Where in the region the shared part begins.
    pub region_offset: u64,
    /// How many bytes of the region lie in the memfd.
    pub fd_len: u64,
}

// SAFETY: the pointer is to memory that stays mapped while `backing` lives (our mapping, or foreign
// memory under the contract of `from_raw`/`adopt`); nothing about it is tied to a thread.
unsafe impl Send for HostRegion {}
// SAFETY: `&HostRegion` only allows raw copies, never references into the bytes; unordered access by
// several threads or processes can tear data, as with any shared memory, but not break the allocator,
// and the fields themselves never change.
unsafe impl Sync for HostRegion {}

impl std::fmt::Debug for HostRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostRegion")
            .field("address", &format_args!("{:#x}", self.address()))
            .field("len", &self.len)
            .field("writable", &self.writable)
            .field("shared_bytes", &self.shared.as_ref().map(|shared| shared.len))
            .finish_non_exhaustive()
    }
}

impl HostRegion {
    /// Makes the region and enters it into the registry, whose guard the caller holds.
    pub(crate) fn assemble(
        registry: &mut registry::Registry,
        base: *mut u8,
        len: u64,
        writable: bool,
        backing: Backing,
        shared: Option<Shared>,
    ) -> Arc<Self> {
        let serial = registry.serial();
        let region = Arc::new(Self {
            base,
            len,
            writable,
            serial,
            backing,
            shared,
        });
        registry.enter(serial, region.address(), len, Arc::downgrade(&region));
        region
    }

    /// Wraps memory that somebody else allocated. `keep` is dropped with the region.
    ///
    /// # Errors
    /// `Region` for an empty range, the null address, a range past the end of the address space, or one that
    /// another thread is adopting right now.
    ///
    /// # Safety
    /// `address..address+len` must be mapped, readable and writable, and stay so until `keep` is
    /// dropped. Nobody may hold a Rust reference to these bytes while pdkv copies into them.
    pub unsafe fn from_raw(address: u64, len: u64, keep: Box<dyn Any + Send + Sync>) -> Result<Arc<Self>> {
        let end = check_range("register", address, len)?;
        let base = std::ptr::with_exposed_provenance_mut(address as usize);
        let mut registry = registry::lock();
        if registry.moving(address, end) {
            return Err(Error::new(
                ErrorKind::Region,
                "register",
                format!("memory at `{address:#x}` is being adopted right now"),
            ));
        }
        Ok(Self::assemble(
            &mut registry,
            base,
            len,
            true,
            Backing::Foreign(keep),
            None,
        ))
    }

    /// The live region with a shared part that holds `address..address+len` whole, and the offset of
    /// `address` in it: how memory handed in as a bare address is recognised as part of a pool.
    pub fn find_shared(address: u64, len: u64) -> Option<(Arc<Self>, u64)> {
        let end = address.checked_add(len)?;
        let mut found = None;
        for region in registry::holding(address, end) {
            if found.is_none() && region.shared.is_some() {
                let offset = address - region.address();
                found = Some((region, offset));
            }
        }
        found
    }

    /// A region of `len` bytes of this one from `offset` on, shared as far as this one is. It keeps this
    /// one alive.
    ///
    /// # Errors
    /// `Region` when the range is empty or does not lie inside.
    pub fn part(self: &Arc<Self>, offset: u64, len: u64) -> Result<Arc<Self>> {
        let source = self.source("part", offset, len)?;
        check_range("part", source.expose_provenance() as u64, len)?;
        let shared = self.shared.as_ref().and_then(|shared| {
            let start = offset.max(shared.region_offset);
            let end = (offset + len).min(shared.region_offset + shared.len);
            (start < end).then(|| Shared {
                fd: Arc::clone(&shared.fd),
                fd_offset: shared.fd_offset + (start - shared.region_offset),
                region_offset: start - offset,
                len: end - start,
            })
        });
        let whole = Backing::Whole(Arc::clone(self));
        let mut registry = registry::lock();
        Ok(Self::assemble(
            &mut registry,
            source.cast_mut(),
            len,
            self.writable,
            whole,
            shared,
        ))
    }

    /// The region that this one is a part of, at the end of the chain; itself when it is no part.
    pub(crate) fn root(self: &Arc<Self>) -> Arc<Self> {
        let mut root = self;
        while let Backing::Whole(whole) = &root.backing {
            root = whole;
        }
        Arc::clone(root)
    }

    /// The number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The address of the first byte in this process.
    pub fn address(&self) -> u64 {
        self.base.expose_provenance() as u64
    }

    /// Whether bytes may be written here; false only for a peer's memory mapped to read.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// The part of the region that a peer on this host can map.
    pub fn shared(&self) -> Option<SharedPart<'_>> {
        self.shared.as_ref().map(|shared| SharedPart {
            fd: shared.fd.as_fd(),
            fd_offset: shared.fd_offset,
            region_offset: shared.region_offset,
            fd_len: shared.len,
        })
    }

    /// Copies bytes out of the region.
    ///
    /// # Errors
    /// `Region` when the range does not lie inside.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let source = self.source("read", offset, into.len() as u64)?;
        // SAFETY: `source` is valid for `into.len()` bytes (bounds just checked against a live region),
        // and `into` is an exclusive Rust slice, which a region's memory is not (see `from_raw`).
        unsafe { std::ptr::copy(source, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes into the region.
    ///
    /// # Errors
    /// `Region` when the range does not lie inside or the region is read-only.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let target = self.target("write", offset, bytes.len() as u64)?;
        // SAFETY: `target` is valid and writable for `bytes.len()` bytes (just checked), and `bytes` is a
        // live slice; `copy` allows the two to overlap.
        unsafe { std::ptr::copy(bytes.as_ptr(), target, bytes.len()) };
        Ok(())
    }

    /// Sets `len` bytes to `value`.
    ///
    /// # Errors
    /// `Region` when the range does not lie inside or the region is read-only.
    pub fn fill(&self, offset: u64, len: u64, value: u8) -> Result<()> {
        let target = self.target("fill", offset, len)?;
        // SAFETY: `target` is valid and writable for `len` bytes (just checked).
        unsafe { std::ptr::write_bytes(target, value, len as usize) };
        Ok(())
    }

    /// The address of a checked range to read from.
    #[inline]
    pub(crate) fn source(&self, operation: &'static str, offset: u64, len: u64) -> Result<*const u8> {
        check_inside(operation, self.len, offset, len)?;
        Ok(self.base.wrapping_add(offset as usize).cast_const())
    }

    /// The address of a checked range to write to.
    #[inline]
    pub(crate) fn target(&self, operation: &'static str, offset: u64, len: u64) -> Result<*mut u8> {
        let source = self.source(operation, offset, len)?;
        if !self.writable {
            return Err(read_only(operation));
        }
        Ok(source.cast_mut())
    }
}

impl Drop for HostRegion {
    fn drop(&mut self) {
        registry::lock().remove(self.serial);
    }
}

#[cold]
pub(crate) fn read_only(operation: &'static str) -> Error {
    Error::new(
        ErrorKind::Region,
        operation,
        "the region is a peer's memory mapped to read, it can't be a destination",
    )
}
