//! Who is at the other end of a Unix-domain socket, as the kernel says.

use std::os::fd::{AsRawFd, BorrowedFd};

use pdkv_core::{Error, ErrorKind, Result};

use crate::os::{last_errno, os_error};

/// A process at the other end of a connected socket, as it was when it connected or began to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PeerCredentials {
    /// Its number in our PID namespace; `None` when it has none there.
    pub pid: Option<u32>,
    /// Its effective user.
    pub uid: u32,
}

impl PeerCredentials {
    /// Asks the kernel.
    ///
    /// # Errors
    /// `Transfer` for a socket that is not connected, or no Unix-domain one.
    pub fn of(socket: BorrowedFd<'_>) -> Result<Self> {
        const OPERATION: &str = "peer_credentials";
        let refuse = |errno| {
            os_error(
                ErrorKind::Transfer,
                OPERATION,
                "the kernel names nobody at the other end",
                errno,
            )
        };
        let mut found = libc::ucred {
            pid: 0,
            uid: u32::MAX,
            gid: u32::MAX,
        };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the kernel writes `len` bytes at most, which is the size of `found`.
        let outcome = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut len,
            )
        };
        if outcome != 0 {
            return Err(refuse(last_errno()));
        }
        if len as usize != size_of::<libc::ucred>() || found.uid == u32::MAX {
            return Err(Error::new(
                ErrorKind::Transfer,
                OPERATION,
                "the socket is connected to nobody",
            ));
        }
        let pid = u32::try_from(found.pid).ok().filter(|&pid| pid != 0);
        Ok(Self { pid, uid: found.uid })
    }

    /// Whether it runs as our user, or as the administrator.
    pub fn is_ours_or_root(&self) -> bool {
        self.uid == effective_user() || self.uid == 0
    }

    /// Whether it runs as our user, or we as the administrator.
    pub fn is_ours_or_below(&self) -> bool {
        self.uid == effective_user() || effective_user() == 0
    }
}

fn effective_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_other_end_of_a_pair_is_this_process() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let found = PeerCredentials::of(ours.as_fd()).unwrap();
        assert_eq!(found.pid, Some(std::process::id()));
        assert!(found.is_ours_or_root() && found.is_ours_or_below());
    }

    #[test]
    fn other_sockets_are_nobodys() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let error = PeerCredentials::of(stream.as_fd()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Transfer);
    }

    #[test]
    fn users_are_told_apart() {
        let of = |uid| PeerCredentials { pid: None, uid };
        let us = effective_user();
        assert!(of(us).is_ours_or_root() && of(us).is_ours_or_below());
        let other = us + 1;
        assert!(!of(other).is_ours_or_root());
        assert_eq!(of(other).is_ours_or_below(), us == 0);
    }
}
