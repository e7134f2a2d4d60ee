//! Shared pools: memory allocated in a sealed memfd, and a peer's memfd mapped here.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pdkv_core::{Error, ErrorKind, Result};
use rustix::fs::{
    MemfdFlags, SealFlags, SeekFrom, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate, memfd_create, seek,
};
use rustix::io::Errno;

use crate::mapping::{Mapping, populates};
use crate::os::{os_error, page_bytes};
use crate::range::check_range;
use crate::region::{Backing, HostRegion, Shared};
use crate::registry;
use crate::stream::{Stop, stopped};

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

const MAP: &str = "map_peer";
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

    /// Maps the first `len` bytes of a peer's memfd, see [`map_peer_at`](Self::map_peer_at).
    ///
    /// # Errors
    /// As [`map_peer_at`](Self::map_peer_at).
    pub fn map_peer(fd: OwnedFd, len: u64, writable: bool) -> Result<Arc<Self>> {
        Self::map_peer_at(fd, 0, len, writable, &AtomicBool::new(false))
    }

    /// Maps `len` bytes of a peer's memfd from `fd_offset` on, every page populated now. `stop` is looked at between the
    /// pages of a gibibyte and those of the next.
    ///
    /// # Errors
    /// `Region` when the descriptor is no memfd, ends before the range, could still be shrunk under the mapping (which would
    /// turn a copy into a fatal signal), or has not all of its pages (which would come to be, and be ours to pay for, as we
    /// map it); `Capacity` when it can't be mapped; `TransferCancelled` when stopped.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the descriptor is consumed: the mapping outlives it"
    )]
    pub fn map_peer_at(fd: OwnedFd, fd_offset: u64, len: u64, writable: bool, stop: &dyn Stop) -> Result<Arc<Self>> {
        check_range(MAP, page_bytes(), len)?;
        let size = sealed_size(&fd)?;
        let Some(end) = fd_offset.checked_add(len).filter(|&end| end <= size) else {
            let message = format!("the memfd holds `{size}` bytes, `{len}` at `{fd_offset}` were announced");
            return Err(Error::new(ErrorKind::Region, MAP, message));
        };
        let page = page_of(&fd)?;
        let (first, last) = (fd_offset - fd_offset % page, end.next_multiple_of(page));
        if populates() && !is_whole(&fd, first, end) {
            let message =
                format!("the memfd has not all pages of the `{len}` bytes at `{fd_offset}` that were announced");
            return Err(Error::new(ErrorKind::Region, MAP, message));
        }
        let failed = |errno| os_error(ErrorKind::Capacity, MAP, format!("`{len}` bytes not mapped"), errno);
        let mapping = Mapping::shared(fd.as_fd(), first, (last - first) as usize, writable).map_err(failed)?;
        if !mapping.populate(writable, stop).map_err(failed)? {
            return Err(stopped(MAP, 0, len));
        }
        let base = mapping.base().wrapping_add((fd_offset - first) as usize);
        let backing = Backing::Mapping(mapping);
        let mut registry = registry::lock();
        Ok(Self::assemble(&mut registry, base, len, writable, backing, None))
    }
}

/// The size of a memfd that can't shrink any more.
fn sealed_size(fd: &OwnedFd) -> Result<u64> {
    let seals =
        fcntl_get_seals(fd).map_err(|errno| os_error(ErrorKind::Region, MAP, "the descriptor is no memfd", errno))?;
    if !seals.contains(SealFlags::SHRINK) {
        let message = "the memfd is not sealed against shrinking";
        return Err(Error::new(ErrorKind::Region, MAP, message));
    }
    let stat = fstat(fd).map_err(|errno| os_error(ErrorKind::Region, MAP, "the memfd has no size", errno))?;
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

/// Whether the memfd has every page from `first` to `end`.
fn is_whole(fd: &OwnedFd, first: u64, end: u64) -> bool {
    let Ok(stat) = fstat(fd) else { return false };
    let bytes = |count: i64| u64::try_from(count).unwrap_or(0);
    let (size, kept) = (bytes(stat.st_size), bytes(stat.st_blocks).saturating_mul(512));
    if kept >= size {
        return true;
    }
    // Where files of huge pages have holes is not told: they say that there is none before their end.
    let tells = page_of(fd).is_ok_and(|page| page == page_bytes());
    tells && seek(fd, SeekFrom::Hole(first)).is_ok_and(|hole| hole >= end)
}

/// The page size a mapping of the descriptor is made of: offsets and lengths must be multiples of it,
/// or a huge page is mapped that `munmap` then refuses to give back.
fn page_of(fd: &OwnedFd) -> Result<u64> {
    const HUGETLBFS_MAGIC: u64 = 0x9584_58F6;
    let stat = fstatfs(fd).map_err(|errno| os_error(ErrorKind::Region, MAP, "the memfd has no page size", errno))?;
    let huge = u64::try_from(stat.f_type).is_ok_and(|kind| kind & 0xFFFF_FFFF == HUGETLBFS_MAGIC);
    let page = u64::try_from(stat.f_bsize).unwrap_or(0);
    Ok(if huge { page.max(page_bytes()) } else { page_bytes() })
}

fn allocate_in(len: u64, page: u64, flags: MemfdFlags, huge: HugePages) -> Result<Arc<HostRegion>, Errno> {
    let size = len.checked_next_multiple_of(page).ok_or(Errno::OVERFLOW)?;
    let fd = sealed_memfd("pdkv-pool", size, flags)?;
    let mapping = map_range(&fd, 0, size, true, huge)?;
    let base = mapping.base();
    let shared = Shared {
        fd: Arc::new(fd),
        fd_offset: 0,
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

fn map_range(fd: &OwnedFd, offset: u64, len: u64, writable: bool, huge: HugePages) -> Result<Mapping, Errno> {
    let mapping = Mapping::shared(fd.as_fd(), offset, len as usize, writable)?;
    if huge == HugePages::Try {
        mapping.advise_huge();
    }
    mapping.populate(writable, &AtomicBool::new(false))?;
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
