//! A connected data stream, TCP or Unix-domain: small exact reads and writes that give up when told
//! to stop. The payload itself goes through `pdkv_device::IoBatch`.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use pdkv_core::id::PeerKey;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Stop;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::Shutdown;

/// How long one look at the stop flag may be delayed.
const SLICE: Duration = Duration::from_millis(50);

/// Data streams one peer may have: as many as it uses at once, and as many that it has closed and that are still being served.
pub(super) const MAX_STREAMS: usize = 128;

/// One data stream, closed on drop.
pub(crate) struct Socket {
    fd: OwnedFd,
}

impl Socket {
    /// Takes a connected stream and makes it blocking, in slices.
    pub(crate) fn new(fd: OwnedFd) -> Result<Self> {
        pdkv_device::configure_stream(fd.as_fd(), SLICE)?;
        // Requests are small and somebody waits for each; Unix-domain streams have no such option.
        let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
        Ok(Self { fd })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Wakes and ends whatever waits on the stream, at both ends.
    pub(crate) fn shut_down(&self) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// Whether the other end is gone, or the stream was shut here.
    pub(crate) fn is_gone(&self) -> bool {
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut look = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        let found = poll(&mut look, Some(&none));
        found.is_ok_and(|count| count > 0) && !look[0].revents().is_empty()
    }

    /// Sleeps until there is something to read or the stream ended; costs nothing while idle.
    pub(crate) fn wait_idle(&self) {
        while let Err(Errno::INTR) = poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], None) {}
    }

    /// The same, until told to stop.
    pub(crate) fn wait_readable(&self, stop: &AtomicBool) {
        let slice = Timespec {
            tv_sec: 0,
            tv_nsec: SLICE.as_nanos() as i64,
        };
        // Whatever else poll says, the next read tells it too.
        while !stop.load(Ordering::Relaxed)
            && matches!(
                poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&slice)),
                Ok(0) | Err(Errno::INTR)
            )
        {}
    }

    pub(crate) fn read_exact(&self, buffer: &mut [u8], stop: &dyn Stop) -> Result<()> {
        pdkv_device::recv_exact(self.fd(), buffer, stop)
    }

    pub(crate) fn write_all(&self, buffer: &[u8], stop: &dyn Stop) -> Result<()> {
        pdkv_device::send_exact(self.fd(), buffer, stop)
    }
}

/// The data streams of every peer, to be shut when the peer is lost.
#[derive(Default)]
pub(crate) struct Streams {
    book: Mutex<BTreeMap<PeerKey, Vec<Weak<Socket>>>>,
}

impl Streams {
    /// # Errors
    /// `Capacity` when the peer has as many streams as any may have: each costs a thread here.
    pub(crate) fn enter(&self, peer: PeerKey, socket: &Arc<Socket>) -> Result<()> {
        let mut book = self.book.lock().expect("no holder panics");
        let list = book.entry(peer).or_default();
        list.retain(|stream| stream.strong_count() > 0);
        if list.len() >= MAX_STREAMS {
            return Err(Error::new(
                ErrorKind::Capacity,
                "data stream",
                format!("the peer has `{MAX_STREAMS}` data streams already"),
            ));
        }
        list.push(Arc::downgrade(socket));
        Ok(())
    }

    pub(crate) fn shut_down(&self, peer: PeerKey) {
        let list = self.book.lock().expect("no holder panics").remove(&peer);
        for socket in list.into_iter().flatten().filter_map(|stream| stream.upgrade()) {
            socket.shut_down();
        }
    }
}
