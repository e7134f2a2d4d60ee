//! A peer's local socket, seen from the side that connected: who listens there, and what may be asked.
//!
//! The peer only says a name. Who is behind it the kernel says, before a byte is sent; and nobody is waited for longer than a
//! while, nor past the moment at which the caller wants no more of it or the peer is lost.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pdkv_core::id::{RegionId, SessionToken};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::{HostRegion, PeerCredentials, Stop};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, socket_with};

use crate::dial::STREAM_FULL;
use crate::local::{Ask, ENTRY, FDS, HELLO, MAGIC, NAME_PREFIX, NAME_RANDOM, SLICE, refuse, turned_away, word};
use crate::mapping::Mapped;
use crate::reply::Reply;

/// How long a peer may take to let us in, and how long to take a question.
const STEP: Duration = Duration::from_secs(5);
/// How long it is asked again while it says that it answers enough of our questions.
const TURN: Duration = Duration::from_secs(10);
/// What comes after the last entry of an answer.
pub(crate) const END: [u8; 1] = [0xE0];

/// Where a peer on this host listens.
#[derive(Clone, Debug)]
pub(crate) struct LocalDoor {
    name: String,
    token: SessionToken,
    /// Who listens there, as the kernel numbers it here.
    pid: u32,
    /// The peer is lost: nobody waits for it any more.
    gone: Arc<AtomicBool>,
}

/// Until when somebody on the other side is waited for.
struct Limit<'a> {
    until: Option<Instant>,
    gone: &'a AtomicBool,
    stopped: &'a dyn Fn() -> bool,
}

impl Stop for Limit<'_> {
    fn stopped(&self) -> bool {
        self.gone.load(Ordering::Acquire) || (self.stopped)() || self.until.is_some_and(|until| Instant::now() >= until)
    }
}

impl Limit<'_> {
    /// What to say of a wait that is over.
    fn over(&self, what: &str) -> Error {
        if (self.stopped)() {
            return Error::new(
                ErrorKind::TransferCancelled,
                "local socket",
                "stopped while waiting for the peer",
            );
        }
        if self.gone.load(Ordering::Acquire) {
            return Error::new(ErrorKind::PeerLost, "local socket", "the peer is lost");
        }
        Error::new(ErrorKind::PeerUnreachable, "local socket", what)
            .with_hint("it is stopped, or has more to do than it can")
    }
}

impl LocalDoor {
    /// The door of this name, once the kernel has said that a process of our user listens there.
    ///
    /// # Errors
    /// `PeerUnreachable`, `TransferCancelled` when told to stop.
    pub(crate) fn find(name: &str, token: SessionToken, stopped: &dyn Fn() -> bool) -> Result<Self> {
        if !is_door(name) {
            return Err(unreachable("its name is none that pdkv gives"));
        }
        let mut door = Self {
            name: name.to_owned(),
            token,
            pid: 0,
            gone: Arc::default(),
        };
        (_, door.pid) = door.connect(stopped)?;
        Ok(door)
    }

    /// The process at the other end, as the kernel numbers it here.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// The peer is lost: whoever waits for it waits no more.
    pub(crate) fn shut(&self) {
        self.gone.store(true, Ordering::Release);
    }

    fn limit<'a>(&'a self, most: Option<Duration>, stopped: &'a dyn Fn() -> bool) -> Limit<'a> {
        Limit {
            until: most.map(|most| Instant::now() + most),
            gone: &self.gone,
            stopped,
        }
    }

    /// A connection, and who is at its other end. Waits for room in the queue of a peer that is slow to accept.
    fn connect(&self, stopped: &dyn Fn() -> bool) -> Result<(OwnedFd, u32)> {
        let refused = |errno: Errno| unreachable("nobody is let in").with_source(std::io::Error::from(errno));
        let limit = self.limit(Some(STEP), stopped);
        let address = SocketAddrUnix::new_abstract_name(self.name.as_bytes()).map_err(refused)?;
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).map_err(refused)?;
        pdkv_device::configure_stream(socket.as_fd(), SLICE)?;
        loop {
            match connect(&socket, &address) {
                Ok(()) => break,
                // The queue was full for a slice.
                Err(Errno::AGAIN | Errno::INTR) if !limit.stopped() => {}
                Err(Errno::AGAIN | Errno::INTR) => return Err(limit.over("the peer's local socket lets nobody in")),
                Err(errno) => return Err(refused(errno)),
            }
        }
        let who = PeerCredentials::of(socket.as_fd())?;
        if !who.is_ours_or_below() {
            return Err(unreachable("another user's process listens there"));
        }
        let Some(pid) = who.pid else {
            return Err(unreachable("its process is in another PID namespace"));
        };
        if self.pid != 0 && pid != self.pid {
            return Err(unreachable("another process listens there now"));
        }
        Ok((socket, pid))
    }

    fn open(&self, ask: Ask, stopped: &dyn Fn() -> bool) -> Result<UnixStream> {
        let stream = UnixStream::from(self.connect(stopped)?.0);
        let mut hello = [0; HELLO];
        hello[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        hello[4] = ask as u8;
        hello[8..24].copy_from_slice(self.token.as_bytes());
        self.send(&stream, &hello, stopped)?;
        Ok(stream)
    }

    fn send(&self, stream: &UnixStream, bytes: &[u8], stopped: &dyn Fn() -> bool) -> Result<()> {
        let limit = self.limit(Some(STEP), stopped);
        let sent = pdkv_device::send_exact(stream.as_fd(), bytes, &limit);
        sent.map_err(|error| match error.kind() {
            ErrorKind::TransferCancelled => limit.over("the peer takes no question at its local socket"),
            // It may have said why before it hung up.
            _ if is_turned_away(stream) => turned_away(),
            _ => error,
        })
    }

    /// Asks, and asks again while that fails for want of room, as where the peer answers enough of our questions: that passes. Blocks.
    ///
    /// # Errors
    /// What the last one says.
    pub(crate) fn in_turn<T>(&self, stopped: &dyn Fn() -> bool, mut ask: impl FnMut() -> Result<T>) -> Result<T> {
        let limit = self.limit(Some(TURN), stopped);
        loop {
            match ask() {
                Err(error) if error.kind() == ErrorKind::Capacity && !limit.stopped() => std::thread::sleep(SLICE),
                said => return said,
            }
        }
    }

    /// A data stream to the peer.
    pub(crate) fn stream(&self, stopped: &dyn Fn() -> bool) -> Result<OwnedFd> {
        Ok(self.open(Ask::Stream, stopped)?.into())
    }

    /// Asks for regions; the answer is yet to be read.
    pub(crate) fn question<'a>(
        &self,
        ask: Ask,
        wanted: &[(RegionId, u64)],
        stopped: &'a dyn Fn() -> bool,
    ) -> Result<Reply<'a>> {
        let stream = self.open(ask, stopped)?;
        let mut question = Vec::with_capacity(4 + wanted.len() * 8);
        question.extend_from_slice(&(wanted.len() as u32).to_le_bytes());
        for (id, _) in wanted {
            question.extend_from_slice(&id.0.to_le_bytes());
        }
        self.send(&stream, &question, stopped)?;
        Ok(Reply::new(stream, stopped, Arc::clone(&self.gone)))
    }

    /// Maps the shared parts of these regions, populated, ready to read and write; says of each that came what became of it,
    /// once.
    ///
    /// # Errors
    /// `PeerUnreachable`, `PeerLost`, `Handshake`, `Capacity` here or there, `TransferCancelled` when told to stop: of the others nothing came.
    pub(crate) fn map(
        &self,
        wanted: &[(RegionId, u64)],
        stopped: &dyn Fn() -> bool,
        mut settle: impl FnMut(RegionId, Result<Mapped>),
    ) -> Result<()> {
        let mut reply = self.question(Ask::Regions, wanted, stopped)?;
        let mut sizes: BTreeMap<RegionId, u64> = wanted.iter().copied().collect();
        let mut answer = vec![0; FDS * ENTRY];
        loop {
            let (count, fds) = reply.piece(&mut answer)?;
            if answer[..count] == END {
                return Ok(());
            }
            if reply.is_full() {
                return Err(turned_away());
            }
            if count != fds.len() * ENTRY {
                return Err(refuse("descriptors and entries don't match"));
            }
            for (entry, fd) in answer[..count].chunks_exact(ENTRY).zip(fds) {
                let (id, region_offset, len) = (RegionId(word(entry, 0)), word(entry, 8), word(entry, 16));
                // Each once: an owner can't keep us here for ever, nor fill our address space.
                let size = sizes
                    .remove(&id)
                    .ok_or_else(|| refuse("a region came that was not asked for"))?;
                if region_offset.checked_add(len).is_some_and(|end| end <= size) {
                    let limit = self.limit(None, stopped);
                    let memory = HostRegion::map_peer_at(fd, word(entry, 24), len, true, &limit);
                    let mapped = memory.map(|memory| Mapped {
                        memory: memory.into(),
                        region_offset,
                    });
                    settle(id, mapped);
                }
            }
        }
    }
}

/// Whether the peer, which takes no more of what is sent, has said that it has enough.
fn is_turned_away(stream: &UnixStream) -> bool {
    let mut word = [0];
    recv(stream, &mut word, RecvFlags::DONTWAIT).is_ok() && word == [STREAM_FULL]
}

/// Whether a name is one that [`listen`](crate::local::listen) gives: nothing else of this host is connected to for a peer.
fn is_door(name: &str) -> bool {
    let lower = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    name.strip_prefix(NAME_PREFIX)
        .is_some_and(|rest| rest.len() == 2 * NAME_RANDOM && rest.bytes().all(lower))
}

fn unreachable(why: &str) -> Error {
    let text = format!("the peer's local socket can't be reached: {why}");
    Error::new(ErrorKind::PeerUnreachable, "local socket", text)
        .with_hint("it needs the same host, network namespace and user")
}

#[cfg(test)]
#[path = "door_tests.rs"]
mod tests;
