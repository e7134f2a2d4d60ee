//! Moving memory that somebody else allocated into a memfd, in place.
//!
//! The whole pages inside a private anonymous range are copied into a sealed memfd which is then mapped
//! shared over the same addresses: pointers, contents and a later `free` or `munmap` stay as they were,
//! but a peer on this host can map the pages. What lies outside whole pages stays where it is.

mod children;
mod refuse;
mod vma;

use std::any::Any;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};

use crate::os::{last_errno, os_error, page_bytes};
use crate::pool::sealed_memfd;
use crate::range::check_range;
use crate::region::{Backing, HostRegion, Shared};
use crate::registry;

const OPERATION: &str = "adopt";

/// Moved at a time: bounds how much memory exists twice.
const CHUNK_BYTES: u64 = 32 << 20;

impl HostRegion {
    /// Moves the whole pages of `address..address+len` into a memfd in place and registers the range.
    ///
    /// A process forked later shares the adopted pages instead of getting a copy of them, and so does
    /// every later user of the addresses until they are unmapped. Transparent huge pages of the range
    /// become base pages where the kernel gives none to memfds.
    ///
    /// # Errors
    /// `Unsupported` with the reason where moving is not safe: file or shared mappings, the program break,
    /// stacks, memory that is locked, pinned, read-only or watched, memory known to a CUDA driver, live
    /// fork children. `Region` when the range overlaps a live region, is not mapped or holds no whole
    /// page; `Capacity` when the memory for the move is not to be had. The range is as it was after every
    /// error.
    ///
    /// # Safety
    /// As [`from_raw`](Self::from_raw). Besides, no thread may write the range during the call, nobody may
    /// use its pages by physical address (registered with a NIC, a GPU or io_uring), and once `keep` is
    /// dropped the allocator must give the addresses back to the kernel rather than to another owner: true
    /// of large allocations, which `malloc` maps by themselves.
    pub unsafe fn adopt(address: u64, len: u64, keep: Box<dyn Any + Send + Sync>) -> Result<Arc<Self>> {
        let end = check_range(OPERATION, address, len)?;
        let page = page_bytes();
        let first = address.next_multiple_of(page);
        let last = end - end % page;
        if first >= last {
            let message = format!("`{len}` bytes at `{address:#x}` hold no whole page");
            return Err(Error::new(ErrorKind::Region, OPERATION, message)
                .with_hint("register such small memory without adopting it"));
        }
        let claim = Claim::on(address, end)?;
        refuse::unsafe_to_move(first, last)?;
        // SAFETY: `first..last` lies in the caller's range, was just found to be private anonymous writable
        // memory without a gap, and by contract nobody writes it meanwhile.
        let fd = unsafe { move_pages(first, last) }?;
        let shared = Shared {
            fd: Arc::new(fd),
            fd_offset: 0,
            region_offset: first - address,
            len: last - first,
        };
        let base = std::ptr::with_exposed_provenance_mut(address as usize);
        let mut registry = registry::lock();
        registry.remove(claim.release());
        Ok(Self::assemble(
            &mut registry,
            base,
            len,
            true,
            Backing::Foreign(keep),
            Some(shared),
        ))
    }
}

/// The range in the registry while its pages move; taken out again however that ends.
struct Claim(u64);

impl Claim {
    fn on(start: u64, end: u64) -> Result<Self> {
        let mut registry = registry::lock();
        if let Some((other_start, other_end)) = registry.overlap(start, end) {
            let message = format!(
                "`{start:#x}..{end:#x}` overlaps the region `{other_start:#x}..{other_end:#x}` that is registered"
            );
            return Err(
                Error::new(ErrorKind::Region, OPERATION, message).with_hint("deregister it first, or use it as it is")
            );
        }
        let serial = registry.serial();
        registry.enter_moving(serial, start, end);
        Ok(Self(serial))
    }

    fn release(self) -> u64 {
        let serial = self.0;
        std::mem::forget(self);
        serial
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        registry::lock().remove(self.0);
    }
}

/// # Safety
/// `first..last` must be whole pages of private anonymous writable memory that nobody writes meanwhile.
unsafe fn move_pages(first: u64, last: u64) -> Result<OwnedFd> {
    let failed = |errno| {
        let message = format!("`{}` bytes can't be moved into a memfd", last - first);
        os_error(ErrorKind::Capacity, OPERATION, message, errno)
    };
    let fd = sealed_memfd("pdkv-adopted", last - first, MemfdFlags::empty()).map_err(failed)?;
    let mut at = first;
    while at < last {
        let len = CHUNK_BYTES.min(last - at);
        let moved = save(fd.as_fd(), at, len, at - first).and_then(|()| {
            // SAFETY: the range is whole pages of the caller's memory, and the memfd now holds its contents, so
            // that the mapping shows the same bytes at the same addresses.
            unsafe { map_over(fd.as_fd(), at, len, at - first) }
        });
        if let Err(errno) = moved {
            // SAFETY: everything up to here is in the memfd; the current chunk is too, or was not touched.
            unsafe { put_back(fd.as_fd(), first, at) };
            return Err(failed(errno));
        }
        at += len;
    }
    Ok(fd)
}

/// Copies memory into the memfd through the kernel, where a page that is gone is an error, no fault.
fn save(fd: BorrowedFd<'_>, address: u64, len: u64, offset: u64) -> Result<(), Errno> {
    let mut done = 0;
    while done < len {
        let from = std::ptr::with_exposed_provenance((address + done) as usize);
        let at = (offset + done).cast_signed();
        // SAFETY: the kernel only reads the range, and answers EFAULT where it can't.
        let step = unsafe { libc::pwrite(fd.as_raw_fd(), from, (len - done) as usize, at) };
        match usize::try_from(step) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(step) => done += step as u64,
            Err(_) => match last_errno() {
                Errno::INTR => {}
                errno => return Err(errno),
            },
        }
    }
    Ok(())
}

/// Maps the memfd over memory that shows the same bytes.
///
/// # Safety
/// `address..address+len` must be whole pages of the adopted range whose contents the memfd holds at
/// `offset`.
unsafe fn map_over(fd: BorrowedFd<'_>, address: u64, len: u64, offset: u64) -> Result<(), Errno> {
    let over = std::ptr::with_exposed_provenance_mut(address as usize);
    let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::POPULATE;
    // SAFETY: the caller vouches for the range, and the same bytes are visible there afterwards.
    match unsafe {
        mmap(
            over,
            len as usize,
            ProtFlags::READ | ProtFlags::WRITE,
            flags,
            fd,
            offset,
        )
    } {
        Ok(_) => Ok(()),
        Err(errno) => {
            // Older kernels unmap before they fail: fill the hole.
            // SAFETY: the memfd holds the contents of exactly this range.
            unsafe { restore(fd, address, len, offset) };
            Err(errno)
        }
    }
}

/// Makes the chunks of `first..end` private again after a failure further on.
///
/// # Safety
/// The memfd must hold the contents of `first..end` from its offset 0 on.
unsafe fn put_back(fd: BorrowedFd<'_>, first: u64, end: u64) {
    let mut at = first;
    while at < end {
        let len = CHUNK_BYTES.min(end - at);
        // SAFETY: vouched for by the caller.
        unsafe { restore(fd, at, len, at - first) };
        at += len;
    }
}

/// Puts private memory with the memfd's bytes in place; where there is none to be had, the shared
/// mapping stays, which shows the same bytes and which no peer knows.
///
/// # Safety
/// The memfd must hold the contents of `address..address+len` at `offset`.
unsafe fn restore(fd: BorrowedFd<'_>, address: u64, len: u64, offset: u64) {
    let over = std::ptr::with_exposed_provenance_mut(address as usize);
    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
    // SAFETY: the caller vouches that the contents of the range are in the memfd, from where they are read
    // back before anybody may look (nobody uses the range during an adoption).
    let mapped = unsafe { mmap_anonymous(over, len as usize, ProtFlags::READ | ProtFlags::WRITE, flags) };
    if mapped.is_err() {
        return;
    }
    let mut done = 0;
    while done < len {
        let into = over.wrapping_byte_add(done as usize);
        let at = (offset + done).cast_signed();
        // SAFETY: the target is the fresh private mapping of `len` bytes made above.
        let step = unsafe { libc::pread(fd.as_raw_fd(), into, (len - done) as usize, at) };
        match usize::try_from(step) {
            Ok(step) if step > 0 => done += step as u64,
            Err(_) if last_errno() == Errno::INTR => {}
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_half_way_leaves_private_memory_with_its_bytes() {
        let page = page_bytes();
        let len = 4 * page;
        let flags = MapFlags::PRIVATE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )
        }
        .unwrap();
        let first = base.expose_provenance() as u64;
        // SAFETY: the mapping above, read and written by this test only, and never unmapped.
        let region = unsafe { HostRegion::from_raw(first, len, Box::new(())) }.unwrap();
        let bytes: Vec<u8> = (0..len).map(|i| (i % 241) as u8).collect();
        region.write_at(0, &bytes).unwrap();
        let fd = sealed_memfd("half-way", len, MemfdFlags::empty()).unwrap();
        save(fd.as_fd(), first, len, 0).unwrap();
        // SAFETY: the memfd holds the bytes of the mapping from offset 0 on.
        unsafe { map_over(fd.as_fd(), first, len, 0) }.unwrap();
        region.write_at(5, b"written while shared").unwrap();
        // SAFETY: as above.
        unsafe { put_back(fd.as_fd(), first, first + len) };
        let vma = &vma::covering(first, first + len).unwrap()[0];
        assert!(vma.refusal().is_none(), "private anonymous again: {:?}", vma.refusal());
        let mut got = vec![0; len as usize];
        region.read_at(0, &mut got).unwrap();
        assert_eq!(&got[5..25], b"written while shared");
        assert_eq!(got[25..], bytes[25..]);
    }
}
