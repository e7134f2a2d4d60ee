//! The Unix-domain side door for peers on the same host: descriptors of shared pools, names of GPUs' memory, and
//! data streams where nothing better is allowed. This is the owner's side; [`door`](crate::door) is the other.
//!
//! The socket's name is abstract and random, the kernel vouches for the user at the other end, and
//! the session token (told over the control channel) vouches for the session.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pdkv_core::id::{PeerKey, RegionId, SessionToken};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::{PeerCredentials, Stop};
use rustix::net::{SendFlags, send};

use crate::accept::hears_answers;
use crate::dial::STREAM_FULL;
use crate::door::END;
use crate::lend::lend;
use crate::look::look;
use crate::shared::Shared;
use crate::transport::tcp::{Greeting, Socket, serve_stream};

pub(crate) const MAGIC: u32 = 0x4C44_4B50; // "PKDL"
pub(crate) const HELLO: usize = 24;
pub(crate) const NAME_PREFIX: &str = "pdkv-";
/// Random bytes of a name, which are written as twice as many hexadecimal digits.
pub(crate) const NAME_RANDOM: usize = 16;
/// Descriptors in one message; the kernel allows 253.
pub(crate) const FDS: usize = 64;
/// Regions one question may name.
const MAX_WANTED: usize = 1 << 16;
/// An entry of an answer: region, where in it the shared part begins, how long that is, and where in
/// the descriptor it begins.
pub(crate) const ENTRY: usize = 32;
/// How long one look at the socket takes at most.
pub(crate) const SLICE: Duration = Duration::from_millis(50);
/// How long a peer may take to say what it wants, all of it.
const ASKING: Duration = Duration::from_secs(10);
/// How long it may take to take the answer, which it maps as it comes. Who needs longer asks again for the rest.
const TAKING: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    Regions = 0,
    Stream = 1,
    /// Only of an owner that has adverted memory of a GPU.
    Lend = 2,
    /// Only of an owner that has adverted memory which may move.
    Look = 3,
}

/// Listens under a fresh random name. `None` where the system allows no such socket.
pub(crate) fn listen() -> Option<(UnixListener, String)> {
    let mut random = [0_u8; NAME_RANDOM];
    getrandom::fill(&mut random).ok()?;
    let name = format!("{NAME_PREFIX}{}", pdkv_core::hex::encode(&random));
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).ok()?).ok()?;
    listener.set_nonblocking(true).ok()?;
    Some((listener, name))
}

/// A peer that has asked something. What counts is how long it is waited for, not how long we take to find an answer.
pub(crate) struct Asker<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) peer: PeerKey,
    stream: UnixStream,
    /// Until when it is waited for at this moment.
    until: Cell<Instant>,
    /// How long it may still be waited for while it takes the answer.
    left: Cell<Duration>,
}

impl Stop for Asker<'_> {
    fn stopped(&self) -> bool {
        self.shared.halted.load(Ordering::Acquire) || self.until.get().stopped()
    }
}

impl Asker<'_> {
    /// The regions that it asks for, each once, however often it is named.
    ///
    /// # Errors
    /// `Handshake` when they are too many, `TransferCancelled` when it does not say in time.
    pub(crate) fn wanted(&self) -> Result<BTreeSet<RegionId>> {
        let mut count = [0; 4];
        pdkv_device::recv_exact(self.stream.as_fd(), &mut count, self)?;
        let count = u32::from_le_bytes(count) as usize;
        if count > MAX_WANTED {
            return Err(refuse("too many regions are asked for"));
        }
        let mut ids = vec![0; count * 8];
        pdkv_device::recv_exact(self.stream.as_fd(), &mut ids, self)?;
        Ok(ids.chunks_exact(8).map(|id| RegionId(word(id, 0))).collect())
    }

    /// Sends a piece of the answer, with the descriptors that ride beside it.
    ///
    /// # Errors
    /// `TransferCancelled` when it does not take the answer in time, `PeerLost`.
    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let start = Instant::now();
        self.until.set(start + self.left.get());
        pdkv_device::send_fds(self.stream.as_fd(), fds, bytes, self)?;
        self.left.set(self.left.get().saturating_sub(start.elapsed()));
        Ok(())
    }
}

/// Tells somebody who has just come that its process has enough of our time, whatever it was about to ask. Waits for nobody.
pub(crate) fn turn_away(stream: &UnixStream) {
    // A fresh stream has room for a byte, or its other end is gone.
    let _ = send(stream, &[STREAM_FULL], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// What somebody says who was turned away.
pub(crate) fn turned_away() -> Error {
    let text = "the peer answers as many questions of this process as it may already";
    Error::new(ErrorKind::Capacity, "local socket", text).with_hint("it passes; try again")
}

/// Answers one connection on the local socket, of a process that the kernel has named. Blocks, so it runs on a thread of its own.
pub(crate) fn answer(shared: &Arc<Shared>, who: PeerCredentials, stream: UnixStream) -> Result<()> {
    pdkv_device::configure_stream(stream.as_fd(), SLICE)?;
    let until = Instant::now() + ASKING;
    let mut hello = [0; HELLO];
    pdkv_device::recv_exact(stream.as_fd(), &mut hello, &until)?;
    let token = SessionToken::from_slice(&hello[8..24]).filter(|_| hello[0..4] == MAGIC.to_le_bytes());
    let peer = token
        .and_then(|token| shared.peer_of_token(token))
        .ok_or_else(|| refuse("the token is of no session"))?;
    let ask = hello[4];
    if ask == Ask::Stream as u8 {
        let answers = hears_answers(shared, peer);
        let greeting = Greeting {
            ready: answers,
            full: answers,
        };
        return serve_stream(shared, peer, Socket::new(stream.into())?, greeting);
    }
    // Whoever maps our memory can write it at any time, until it is gone.
    let maps = ask == Ask::Regions as u8 || ask == Ask::Lend as u8;
    if maps && !shared.watch_writer(peer, who.pid) {
        return Err(refuse("the peer's process can't be watched from here"));
    }
    let asker = Asker {
        shared,
        peer,
        stream,
        until: Cell::new(until),
        left: Cell::new(TAKING),
    };
    match ask {
        _ if ask == Ask::Regions as u8 => give_regions(&asker),
        _ if ask == Ask::Lend as u8 => lend(&asker),
        _ if ask == Ask::Look as u8 => look(&asker),
        _ => Err(refuse("the question is unknown")),
    }
}

fn give_regions(asker: &Asker<'_>) -> Result<()> {
    let regions: Vec<_> = asker
        .wanted()?
        .into_iter()
        .filter_map(|id| asker.shared.registry.region_for(asker.peer, id).ok())
        .collect();
    let parts: Vec<_> = regions
        .iter()
        .filter_map(|region| Some((region.id, region.memory.shared()?)))
        .collect();
    for group in parts.chunks(FDS) {
        let mut entries = Vec::with_capacity(group.len() * ENTRY);
        for (id, part) in group {
            entries.extend_from_slice(&id.0.to_le_bytes());
            entries.extend_from_slice(&part.region_offset.to_le_bytes());
            entries.extend_from_slice(&part.fd_len.to_le_bytes());
            entries.extend_from_slice(&part.fd_offset.to_le_bytes());
        }
        let fds: Vec<_> = group.iter().map(|(_, part)| part.fd).collect();
        asker.send(&entries, &fds)?;
    }
    asker.send(&END, &[])
}

pub(crate) fn broken(error: std::io::Error) -> Error {
    Error::new(ErrorKind::PeerLost, "local socket", "the local socket broke or stalled").with_source(error)
}

pub(crate) fn word(raw: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&raw[at..at + 8]);
    u64::from_le_bytes(bytes)
}

pub(crate) fn refuse(why: &str) -> Error {
    Error::new(ErrorKind::Handshake, "local socket", why)
}
