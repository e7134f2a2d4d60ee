//! A peer process of this host, held by pidfd so that its number can't come to mean another one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use pdkv_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::os::{last_errno, os_error};

/// The most bytes one probe compares.
const PROBE_BYTES: usize = 4096;

/// One process, alive or gone.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    pidfd: OwnedFd,
}

impl Process {
    /// Takes hold of the process that has `pid` in this pid namespace now.
    ///
    /// Whether it is the process one means, only [`probe`](Self::probe) tells: ids are per namespace.
    ///
    /// # Errors
    /// `PeerLost` when there is none, `Unsupported` when the kernel has no pidfds or forbids them.
    pub fn open(pid: u32) -> Result<Self> {
        const OPERATION: &str = "open_process";
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| {
            Error::new(
                ErrorKind::PeerLost,
                OPERATION,
                format!("`{pid}` is no process id of this namespace"),
            )
        })?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| {
            let kind = if errno == Errno::SRCH || errno == Errno::INVAL {
                ErrorKind::PeerLost
            } else {
                ErrorKind::Unsupported
            };
            os_error(kind, OPERATION, format!("no handle on process `{pid}`"), errno)
        })?;
        Ok(Self { pid, pidfd })
    }

    /// The process id in this namespace.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Whether the process still runs. While it does, its id is its own.
    pub fn alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        loop {
            match poll(&mut fds, Some(&Timespec::default())) {
                Err(Errno::INTR | Errno::AGAIN) => {}
                result => return result == Ok(0),
            }
        }
    }

    /// Whether the bytes at an address of that process are `expected` (at most 4,096 of them).
    ///
    /// `false` means that it is some other process: another pid namespace, or an id used again.
    ///
    /// # Errors
    /// `Unsupported` when the kernel refuses to let us read, `PeerLost` when the process is gone,
    /// `Config` for an empty or too long expectation.
    pub fn probe(&self, remote_address: u64, expected: &[u8]) -> Result<bool> {
        const OPERATION: &str = "probe";
        if expected.is_empty() || expected.len() > PROBE_BYTES {
            return Err(Error::new(
                ErrorKind::Config,
                OPERATION,
                format!("a probe compares 1 to {PROBE_BYTES} bytes, not `{}`", expected.len()),
            ));
        }
        let mut found = [0_u8; PROBE_BYTES];
        let local = libc::iovec {
            iov_base: found.as_mut_ptr().cast(),
            iov_len: expected.len(),
        };
        let remote = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(remote_address as usize),
            iov_len: expected.len(),
        };
        if !self.alive() {
            return Err(self.lost(OPERATION));
        }
        // SAFETY: `local` describes `found`, which outlives the call and is at least `expected.len()` long;
        // the remote address is only used in the other process, where a bad one is EFAULT.
        let read = unsafe { libc::process_vm_readv(self.raw_pid(), &raw const local, 1, &raw const remote, 1, 0) };
        if read < 0 {
            let errno = last_errno();
            return match errno {
                Errno::FAULT => Ok(false),
                _ => Err(self.refused(OPERATION, errno)),
            };
        }
        Ok(read.unsigned_abs() == expected.len() && &found[..expected.len()] == expected && self.alive())
    }

    pub(crate) fn raw_pid(&self) -> libc::pid_t {
        self.pid.as_raw_nonzero().get()
    }

    pub(crate) fn lost(&self, operation: &'static str) -> Error {
        Error::new(
            ErrorKind::PeerLost,
            operation,
            format!("process `{}` is gone", self.pid()),
        )
    }

    /// The typed form of what `process_vm_readv` and its twin refuse, bad addresses aside.
    pub(crate) fn refused(&self, operation: &'static str, errno: Errno) -> Error {
        match errno {
            Errno::SRCH => self.lost(operation),
            Errno::PERM | Errno::ACCESS | Errno::NOSYS => os_error(
                ErrorKind::Unsupported,
                operation,
                format!("no access to the memory of process `{}`", self.pid()),
                errno,
            )
            .with_hint(
                "both processes need the same user and ptrace rights: see `kernel.yama.ptrace_scope`, and \
                 `--cap-add=SYS_PTRACE` for containers",
            ),
            Errno::NOMEM => os_error(ErrorKind::Capacity, operation, "the kernel is out of memory", errno),
            _ => os_error(
                ErrorKind::Transfer,
                operation,
                format!("copy with process `{}` failed", self.pid()),
                errno,
            ),
        }
    }
}

/// The pidfd: readable once the process has ended, for poll loops.
impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_memory_probes_true_and_other_contents_false() {
        let us = Process::open(std::process::id()).unwrap();
        let word = *b"pdkv probe nonce";
        let address = std::hint::black_box(&word).as_ptr().expose_provenance() as u64;
        assert!(us.alive());
        assert!(us.probe(address, &word).unwrap());
        assert!(!us.probe(address, b"another nonce ..").unwrap());
        assert!(
            !us.probe(8, &word).unwrap(),
            "an unmapped address is a no, not an error"
        );
        assert_eq!(us.probe(address, &[]).unwrap_err().kind(), ErrorKind::Config);
        assert_eq!(us.probe(address, &[0; 4097]).unwrap_err().kind(), ErrorKind::Config);
    }

    #[test]
    fn each_refusal_of_the_kernel_has_its_kind() {
        let us = Process::open(std::process::id()).unwrap();
        for (errno, kind) in [
            (Errno::PERM, ErrorKind::Unsupported),
            (Errno::NOSYS, ErrorKind::Unsupported),
            (Errno::SRCH, ErrorKind::PeerLost),
            (Errno::NOMEM, ErrorKind::Capacity),
            (Errno::INVAL, ErrorKind::Transfer),
        ] {
            assert_eq!(us.refused("cma_read", errno).kind(), kind, "{errno}");
        }
        let error = us.refused("probe", Errno::PERM);
        assert!(error.hint().unwrap().contains("ptrace_scope"), "{error:?}");
    }

    #[test]
    fn impossible_ids_are_lost_peers() {
        for pid in [0, u32::MAX, i32::MAX.unsigned_abs()] {
            assert_eq!(Process::open(pid).unwrap_err().kind(), ErrorKind::PeerLost, "{pid}");
        }
    }
}
