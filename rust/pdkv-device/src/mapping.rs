//! An owned shared mapping of a memfd: unmapped on drop, populated when it is made.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::stream::Stop;

/// Populated between two looks at whether to stop: a fraction of a second, and whole pages of every size.
const STEP_BYTES: usize = 1 << 30;

/// Whether the kernel populates mappings when asked to.
pub(crate) fn populates() -> bool {
    // SAFETY: a length of zero touches nothing; the kernel only says whether it knows the advice.
    unsafe { madvise(std::ptr::null_mut(), 0, Advice::LinuxPopulateWrite) }.is_ok()
}

/// One `mmap` of ours. Nothing hands out references into it; readers and writers go by raw copies.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: *mut c_void,
    len: usize,
}

// SAFETY: the mapping is plain memory with no thread affinity; `Mapping` only stores where it is, and
// unmapping from another thread than the mapping one is allowed by the kernel.
unsafe impl Send for Mapping {}
// SAFETY: no method reads or writes the mapped bytes, and none takes `&self` to change the fields.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` from `offset` on, both multiples of its page size, at an address the kernel
    /// picks.
    pub(crate) fn shared(fd: BorrowedFd<'_>, offset: u64, len: usize, writable: bool) -> Result<Self, Errno> {
        let protection = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: without MAP_FIXED the kernel picks unused addresses, so no existing memory changes.
        let base = unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, fd, offset) }?;
        Ok(Self { base, len })
    }

    /// Asks for transparent huge pages; a kernel that has none for memfds says no and nothing changes.
    pub(crate) fn advise_huge(&self) {
        // SAFETY: `base..base+len` is our own live mapping, and the advice changes no content.
        let _ = unsafe { madvise(self.base, self.len, Advice::LinuxHugepage) };
    }

    /// Faults every page in now, so that no transfer pays for it and a lack of memory is an error
    /// here instead of a signal later. `false` when told to stop before the last one.
    pub(crate) fn populate(&self, writable: bool, stop: &dyn Stop) -> Result<bool, Errno> {
        let advice = if writable {
            Advice::LinuxPopulateWrite
        } else {
            Advice::LinuxPopulateRead
        };
        let mut at = 0;
        while at < self.len {
            if stop.stopped() {
                return Ok(false);
            }
            let step = STEP_BYTES.min(self.len - at);
            // SAFETY: the step lies in `base..base+len`, our own live mapping, and populating changes no content.
            match unsafe { madvise(self.base.wrapping_byte_add(at), step, advice) } {
                Err(Errno::INTR | Errno::AGAIN) => {}
                // Kernels before 5.14 do not know the advice: pages then come on first touch.
                Err(Errno::INVAL) => return Ok(true),
                Err(errno) => return Err(errno),
                Ok(()) => at += step,
            }
        }
        Ok(true)
    }

    /// Where the mapping starts.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.cast()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base..base+len` was returned by mmap, is unmapped nowhere else, and whoever holds the
        // base pointer (`HostRegion`) keeps this value alive for as long as it uses it.
        let _ = unsafe { munmap(self.base, self.len) };
    }
}
