//! Adoption of memory somebody else allocated: what it must keep, and every refusal.

mod common;

use std::any::Any;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use common::{Other, noise};
use pdkv_core::{ErrorKind, Result};
use pdkv_device::{HostRegion, HugePages, recv_fds, send_fds};

const PAGE: u64 = 4096;

/// Adoption looks for children that share memory, and one test here forks some: one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An anonymous mapping with a page without access on each side, so that nothing merges with it.
struct Memory {
    base: *mut libc::c_void,
    len: usize,
}

impl Memory {
    fn new(len: u64) -> Self {
        let whole = len as usize + 2 * PAGE as usize;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let guard = unsafe { libc::mmap(std::ptr::null_mut(), whole, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(guard, libc::MAP_FAILED);
        let memory = Self {
            base: guard.wrapping_byte_add(PAGE as usize),
            len: len as usize,
        };
        memory.protect(0, len, libc::PROT_READ | libc::PROT_WRITE);
        memory
    }

    fn address(&self) -> u64 {
        self.base.expose_provenance() as u64
    }

    fn protect(&self, offset: u64, len: u64, protection: i32) {
        // SAFETY: part of the mapping above.
        let done = unsafe { libc::mprotect(self.base.wrapping_byte_add(offset as usize), len as usize, protection) };
        assert_eq!(done, 0);
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        assert!(offset as usize + bytes.len() <= self.len);
        let to = self.base.wrapping_byte_add(offset as usize).cast();
        // SAFETY: inside the mapping, which nothing else refers to.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // SAFETY: the mapping is `len` bytes long.
        unsafe { std::ptr::copy_nonoverlapping(self.base.cast(), bytes.as_mut_ptr(), self.len) };
        bytes
    }

    fn adopt(&self) -> Result<Arc<HostRegion>> {
        adopt(self.address(), self.len as u64, Box::new(()))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping with its guards, made in `new`; regions over it are gone or unused by now.
        let done = unsafe { libc::munmap(self.base.wrapping_byte_sub(PAGE as usize), self.len + 2 * PAGE as usize) };
        assert_eq!(done, 0);
    }
}

fn adopt(address: u64, len: u64, keep: Box<dyn Any + Send + Sync>) -> Result<Arc<HostRegion>> {
    // SAFETY: every test here hands in memory of its own that nobody writes meanwhile, or memory that is
    // refused before anything happens to it.
    unsafe { HostRegion::adopt(address, len, keep) }
}

/// In the other process: writes into what it is sent.
#[test]
fn the_other_process() {
    let Some(mut socket) = common::parent() else { return };
    let mut bytes = [0; 8];
    let (_, mut fds) = recv_fds(socket.as_fd(), &mut bytes, 1).unwrap().unwrap();
    let region = HostRegion::map_peer(fds.pop().unwrap(), u64::from_le_bytes(bytes), true).unwrap();
    let mut seen = vec![0; region.len() as usize];
    region.read_at(0, &mut seen).unwrap();
    region.write_at(PAGE, &noise(2, PAGE)).unwrap();
    common::tell(&mut socket, u64::from(seen == noise(1, region.len())));
    common::linger(socket);
}

#[test]
fn address_and_contents_stay_and_the_peers_write_is_seen() {
    let _alone = alone();
    // More than one chunk of the move, and an odd tail chunk.
    let len = (70 << 20) + PAGE;
    let memory = Memory::new(len);
    memory.write(0, &noise(1, len));
    let region = memory.adopt().unwrap();
    assert_eq!((region.address(), region.len()), (memory.address(), len));
    assert!(memory.bytes() == noise(1, len));
    let shared = region.shared().unwrap();
    assert_eq!((shared.region_offset, shared.fd_len), (0, len));
    let mut other = Other::start("the_other_process");
    send_fds(
        other.socket.as_fd(),
        &[shared.fd],
        &len.to_le_bytes(),
        &AtomicBool::new(false),
    )
    .unwrap();
    assert_eq!(other.word(), 1, "the peer sees our bytes");
    let bytes = memory.bytes();
    assert!(bytes[PAGE as usize..2 * PAGE as usize] == noise(2, PAGE));
    assert!(bytes[2 * PAGE as usize..] == noise(1, len)[2 * PAGE as usize..]);
}

#[test]
fn edges_outside_whole_pages_stay_private() {
    let _alone = alone();
    let memory = Memory::new(8 * PAGE);
    memory.write(0, &noise(1, 8 * PAGE));
    let region = adopt(memory.address() + 100, 5 * PAGE, Box::new(())).unwrap();
    let shared = region.shared().unwrap();
    assert_eq!((shared.region_offset, shared.fd_len), (PAGE - 100, 4 * PAGE));
    let part = region.part(PAGE, 3 * PAGE).unwrap();
    let of_part = part.shared().unwrap();
    assert_eq!(
        (of_part.fd_offset, of_part.region_offset, of_part.fd_len),
        (100, 0, 3 * PAGE)
    );
    assert!(region.part(0, PAGE - 100).unwrap().shared().is_none());
    let fd = shared.fd.try_clone_to_owned().unwrap();
    let view = HostRegion::map_peer(fd, 4 * PAGE, true).unwrap();
    view.write_at(0, b"first shared byte").unwrap();
    region.write_at(0, b"first private byte").unwrap();
    let bytes = memory.bytes();
    assert!(bytes[PAGE as usize..].starts_with(b"first shared byte"));
    assert!(bytes[100..].starts_with(b"first private byte"));
    assert!(bytes[6 * PAGE as usize..] == noise(1, 8 * PAGE)[6 * PAGE as usize..]);
}

#[test]
fn freeing_adopted_memory_later_is_harmless() {
    let _alone = alone();
    for _ in 0..3 {
        // Above glibc's largest mmap threshold, so that the allocation has a mapping of its own.
        let memory: Arc<Mutex<Vec<u8>>> = Arc::new(Mutex::new(noise(1, 40 << 20)));
        let address = memory.lock().unwrap().as_ptr().expose_provenance() as u64;
        let region = adopt(address, 40 << 20, Box::new(Arc::clone(&memory))).unwrap();
        assert!(*memory.lock().unwrap() == noise(1, 40 << 20));
        memory.lock().unwrap()[0] ^= 1;
        let fd = region.shared().unwrap().fd.try_clone_to_owned().unwrap();
        let inside = region.shared().unwrap().fd_len;
        drop(region);
        assert_eq!(Arc::strong_count(&memory), 1, "the keeper goes with the region");
        drop(memory);
        let view = HostRegion::map_peer(fd, inside, true).unwrap();
        view.fill(0, inside, 0xAA).unwrap();
        let next = noise(2, 40 << 20);
        assert!(
            next == noise(2, 40 << 20),
            "a late write of a peer reaches nobody's memory"
        );
    }
}

#[test]
fn unmapping_adopted_memory_under_the_region_is_harmless_to_its_drop() {
    let _alone = alone();
    let memory = Memory::new(4 * PAGE);
    let region = memory.adopt().unwrap();
    drop(memory);
    drop(region);
}

#[track_caller]
fn refused(result: Result<Arc<HostRegion>>, kind: ErrorKind, words: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.message().contains(words), "{error}");
}

#[test]
fn ranges_that_hold_no_page_or_no_memory_are_refused() {
    let _alone = alone();
    let memory = Memory::new(4 * PAGE);
    let at = memory.address();
    refused(
        adopt(at + 1, 2 * PAGE - 2, Box::new(())),
        ErrorKind::Region,
        "no whole page",
    );
    refused(adopt(at, 0, Box::new(())), ErrorKind::Region, "empty");
    refused(adopt(0, PAGE, Box::new(())), ErrorKind::Region, "null");
    refused(adopt(at, u64::MAX, Box::new(())), ErrorKind::Region, "address space");
    refused(
        adopt(at, 5 * PAGE, Box::new(())),
        ErrorKind::Unsupported,
        "not readable",
    );
    // SAFETY: one page of the mapping above, which nothing refers to.
    let unmapped = unsafe { libc::munmap(memory.base.wrapping_byte_add(PAGE as usize), PAGE as usize) };
    assert_eq!(unmapped, 0);
    refused(memory.adopt(), ErrorKind::Region, "nothing is mapped");
}

#[test]
fn memory_that_is_registered_or_adopted_already_is_refused() {
    let _alone = alone();
    let memory = Memory::new(8 * PAGE);
    // SAFETY: memory of this test, alive for the whole test.
    let region = unsafe { HostRegion::from_raw(memory.address() + 7 * PAGE, 10, Box::new(())) }.unwrap();
    refused(memory.adopt(), ErrorKind::Region, "is registered");
    drop(region);
    let region = memory.adopt().unwrap();
    refused(memory.adopt(), ErrorKind::Region, "is registered");
    drop(region);
    refused(memory.adopt(), ErrorKind::Unsupported, "shared");
    let pool = HostRegion::allocate(8 * PAGE, HugePages::Never).unwrap();
    refused(
        adopt(pool.address(), 8 * PAGE, Box::new(())),
        ErrorKind::Region,
        "is registered",
    );
}

#[test]
fn memory_that_is_more_than_plain_pages_is_refused() {
    let _alone = alone();
    let memory = Memory::new(8 * PAGE);
    memory.write(0, &noise(1, 8 * PAGE));
    memory.protect(4 * PAGE, PAGE, libc::PROT_READ);
    refused(memory.adopt(), ErrorKind::Unsupported, "not readable and writable");
    memory.protect(4 * PAGE, PAGE, libc::PROT_READ | libc::PROT_WRITE);
    let advise = |advice| {
        // SAFETY: the mapping of this test; neither advice used below changes its content.
        assert_eq!(unsafe { libc::madvise(memory.base, memory.len, advice) }, 0);
    };
    advise(libc::MADV_DONTFORK);
    refused(memory.adopt(), ErrorKind::Unsupported, "DMA");
    advise(libc::MADV_DOFORK);
    // SAFETY: as above.
    if unsafe { libc::mlock(memory.base, PAGE as usize) } == 0 {
        refused(memory.adopt(), ErrorKind::Unsupported, "locked");
        // SAFETY: as above.
        assert_eq!(unsafe { libc::munlock(memory.base, PAGE as usize) }, 0);
    } else {
        common::skipped("locked memory", &std::io::Error::last_os_error());
    }
    memory.adopt().unwrap();
    assert!(memory.bytes() == noise(1, 8 * PAGE), "no refusal changed a byte");
}

#[test]
fn file_mappings_and_stacks_are_refused() {
    let _alone = alone();
    let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    for (flags, words) in [(libc::MAP_PRIVATE, "mapping of the file"), (libc::MAP_SHARED, "shared")] {
        let writable = if flags == libc::MAP_PRIVATE {
            libc::PROT_WRITE
        } else {
            0
        };
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                8192,
                libc::PROT_READ | writable,
                flags,
                std::os::fd::AsRawFd::as_raw_fd(&file),
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        refused(
            adopt(base.expose_provenance() as u64, 8192, Box::new(())),
            ErrorKind::Unsupported,
            words,
        );
        // SAFETY: the mapping made above.
        assert_eq!(unsafe { libc::munmap(base, 8192) }, 0);
    }
    // SAFETY: asking for the program break changes nothing.
    let heap = unsafe { libc::sbrk(0) }.expose_provenance() as u64;
    refused(
        adopt(heap - 2 * PAGE, 2 * PAGE, Box::new(())),
        ErrorKind::Unsupported,
        "[heap]",
    );
}

#[test]
fn a_living_fork_child_is_refused_and_a_dead_one_is_not() {
    let _alone = alone();
    let memory = Memory::new(4 * PAGE);
    memory.write(0, &noise(1, 4 * PAGE));
    // SAFETY: the child calls nothing but `pause`, which is allowed between fork and exec.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            // SAFETY: no arguments; returns when a signal was handled.
            unsafe { libc::pause() };
        }
    }
    assert!(child > 0);
    refused(memory.adopt(), ErrorKind::Unsupported, &format!("`{child}`, forked"));
    // SAFETY: signals the child made above, which has not been waited for.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
    // SAFETY: waits for that child; no status is asked for.
    assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
    memory.adopt().unwrap();
    assert!(memory.bytes() == noise(1, 4 * PAGE));
}

#[test]
fn a_child_that_runs_a_program_of_its_own_is_no_obstacle() {
    let _alone = alone();
    let other = Other::start("the_other_process");
    let memory = Memory::new(64 * PAGE);
    memory.adopt().unwrap();
    drop(other);
}
