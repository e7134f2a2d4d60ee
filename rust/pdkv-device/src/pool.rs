//! Shared pools: memory allocated in a sealed memfd, and a peer's memfd mapped here.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;

use crate::mapping::Mapping;
use crate::os::{os_error, page_bytes};
use crate::region::{Backing, HostRegion, Shared, check_range};
use crate::registry;

/// Whether a pool asks for huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Pages of the base size.
    Never,
    /// Reserved huge pages when the host has enough free ones, else transparent ones where the kernel
    /// gives them to memfds, else base pages: never an error.
    #[default]
    Try,
}

const HUGE_PAGE_BYTES: u64 = 2 << 20;

impl HostRegion {
    /// Allocates zeroed memory that a peer on this host can map. All of it is present on return: a pool
    /// is working memory, and a page fault per page would land in the first transfer.
    ///
    /// # Errors
    /// `Region` for an empty or impossible length, `Capacity` when the memory is not to be had.
    pub fn allocate(len: u64, huge: HugePages) -> Result<Arc<Self>> {
        check_range("allocate", page_bytes(), len)?;
        if huge == HugePages::Try
            && len >= HUGE_PAGE_BYTES
            && let Ok(region) = allocate_in(len, HUGE_PAGE_BYTES, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, huge)
        {
            return Ok(region);
        }
        allocate_in(len, page_bytes(), MemfdFlags::empty(), huge).map_err(|errno| {
            os_error(
                ErrorKind::Capacity,
                "allocate",
                format!("no pool of `{len}` bytes"),
                errno,
            )
        })
    }

    /// Maps a peer's memfd, every page populated now.
    ///
    /// # Errors
    /// `Region` when the descriptor is no memfd, is shorter than `len`, or could still be shrunk under
    /// the mapping (which would turn a copy into a fatal signal); `Capacity` when it can't be mapped.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the descriptor is consumed: the mapping outlives it"
    )]
    pub fn map_peer(fd: OwnedFd, len: u64, writable: bool) -> Result<Arc<Self>> {
        const OPERATION: &str = "map_peer";
        check_range(OPERATION, page_bytes(), len)?;
        let seals = fcntl_get_seals(&fd)
            .map_err(|errno| os_error(ErrorKind::Region, OPERATION, "the descriptor is no memfd", errno))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(Error::new(
                ErrorKind::Region,
                OPERATION,
                "the memfd is not sealed against shrinking",
            ));
        }
        let size = fstat(&fd)
            .map_err(|errno| os_error(ErrorKind::Region, OPERATION, "the memfd has no size", errno))?
            .st_size;
        if u64::try_from(size).unwrap_or(0) < len {
            return Err(Error::new(
                ErrorKind::Region,
                OPERATION,
                format!("the memfd holds `{size}` bytes, `{len}` were announced"),
            ));
        }
        let mapping = map_whole(&fd, len, writable, HugePages::Never).map_err(|errno| {
            os_error(
                ErrorKind::Capacity,
                OPERATION,
                format!("`{len}` bytes not mapped"),
                errno,
            )
        })?;
        let base = mapping.base();
        let mut registry = registry::lock();
        Ok(Self::assemble(
            &mut registry,
            base,
            len,
            writable,
            Backing::Mapping(mapping),
            None,
        ))
    }
}

fn allocate_in(len: u64, page: u64, flags: MemfdFlags, huge: HugePages) -> Result<Arc<HostRegion>, Errno> {
    let size = len.checked_next_multiple_of(page).ok_or(Errno::OVERFLOW)?;
    let fd = sealed_memfd("pdkv-pool", size, flags)?;
    let mapping = map_whole(&fd, size, true, huge)?;
    let base = mapping.base();
    let shared = Shared {
        fd,
        region_offset: 0,
        len,
    };
    let mut registry = registry::lock();
    Ok(HostRegion::assemble(
        &mut registry,
        base,
        len,
        true,
        Backing::Mapping(mapping),
        Some(shared),
    ))
}

fn map_whole(fd: &OwnedFd, len: u64, writable: bool, huge: HugePages) -> Result<Mapping, Errno> {
    let mapping = Mapping::shared(fd.as_fd(), len as usize, writable)?;
    if huge == HugePages::Try {
        mapping.advise_huge();
    }
    mapping.populate(writable)?;
    Ok(mapping)
}

/// A memfd of fixed size: sealed against shrinking and growing, so that no holder can turn another
/// one's copy into SIGBUS.
pub(crate) fn sealed_memfd(name: &str, size: u64, flags: MemfdFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // NOEXEC_SEAL silences the warning of newer kernels and is required where vm.memfd_noexec is 2; older
    // kernels do not know it.
    let fd = match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create(name, flags)?,
        other => other?,
    };
    rustix::io::retry_on_intr(|| ftruncate(&fd, size))?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}
