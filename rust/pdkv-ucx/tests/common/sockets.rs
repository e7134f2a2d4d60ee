//! The TCP connections of this process, which in a case that runs alone are UCX's.

use std::mem::{MaybeUninit, size_of};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// Waits until more has arrived on the connections than `before`; goes on after a second, since what a copy of UCX
/// answers, and when, differs. Gives what has arrived and nobody has read, in bytes.
pub(crate) fn arrives(before: usize) -> usize {
    let until = Instant::now() + Duration::from_secs(1);
    while unread() <= before && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    unread()
}

/// What nobody has read yet, in bytes.
pub(crate) fn unread() -> usize {
    connections()
        .into_iter()
        .map(|socket| {
            let mut waiting: libc::c_int = 0;
            // SAFETY: asks the kernel for a number, into one of ours.
            unsafe { libc::ioctl(socket, libc::FIONREAD, &raw mut waiting) };
            usize::try_from(waiting).unwrap_or(0)
        })
        .sum()
}

/// Has every further send fail, while what has arrived can still be read: as after a peer's death. Gives how many.
pub(crate) fn shut_for_sending() -> usize {
    let open = connections();
    for socket in &open {
        // SAFETY: a call on a descriptor; nothing of ours is touched.
        assert_eq!(unsafe { libc::shutdown(*socket, libc::SHUT_WR) }, 0);
    }
    open.len()
}

fn connections() -> Vec<RawFd> {
    (3..256).filter(|socket| is_connected(*socket)).collect()
}

fn is_connected(socket: RawFd) -> bool {
    let mut peer = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let mut len = libc::socklen_t::try_from(size_of::<libc::sockaddr_storage>()).unwrap();
    // SAFETY: the kernel writes at most `len` bytes of an address into the memory behind `peer`, which has them.
    let status = unsafe { libc::getpeername(socket, peer.as_mut_ptr().cast(), &raw mut len) };
    // SAFETY: zeroed, and written by the kernel; every pattern of bits is a valid address.
    let family = i32::from(unsafe { peer.assume_init() }.ss_family);
    status == 0 && (family == libc::AF_INET || family == libc::AF_INET6)
}
