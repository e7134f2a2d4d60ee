//! The Unix-domain side door for peers on the same host: descriptors of shared pools, names of GPUs' memory, and
//! data streams where nothing better is allowed.
//!
//! The socket's name is abstract and random, the kernel vouches for the user at the other end, and
//! the session token (told over the control channel) vouches for the session.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use pdkv_core::id::{PeerKey, RegionId, SessionToken};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::HostRegion;

use crate::lend::lend;
use crate::look::look;
use crate::remote::Mapped;
use crate::reply::Reply;
use crate::shared::Shared;
use crate::suspect::Writer;
use crate::transport::tcp::{Socket, serve_stream};

const MAGIC: u32 = 0x4C44_4B50; // "PKDL"
const HELLO: usize = 24;
/// Descriptors in one message; the kernel allows 253.
pub(crate) const FDS: usize = 64;
/// Regions one question may name.
const MAX_WANTED: usize = 1 << 16;
/// An entry of an answer: region, where in it the shared part begins, how long that is, and where in
/// the descriptor it begins.
const ENTRY: usize = 32;
/// What follows the last entry.
const END: [u8; 1] = [0xE0];
/// How long a step on this socket may take; the other end is a thread on this host.
const STEP: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    Regions = 0,
    Stream = 1,
    /// Only of an owner that has adverted memory of a GPU.
    Lend = 2,
    /// Only of an owner that has adverted memory which may move.
    Look = 3,
}

/// Where a peer on this host listens.
#[derive(Clone)]
pub(crate) struct LocalDoor {
    pub(crate) name: String,
    pub(crate) token: SessionToken,
}

/// Listens under a fresh random name. `None` where the system allows no such socket.
pub(crate) fn listen() -> Option<(UnixListener, String)> {
    let mut random = [0_u8; 16];
    getrandom::fill(&mut random).ok()?;
    let name = format!("pdkv-{}", pdkv_core::hex::encode(&random));
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).ok()?).ok()?;
    listener.set_nonblocking(true).ok()?;
    Some((listener, name))
}

impl LocalDoor {
    pub(crate) fn open(&self, ask: Ask) -> Result<UnixStream> {
        let fail = |error: std::io::Error| {
            Error::new(
                ErrorKind::PeerUnreachable,
                "local socket",
                "the peer's local socket can't be reached",
            )
            .with_hint("it needs the same host, network namespace and user")
            .with_source(error)
        };
        let address = SocketAddr::from_abstract_name(&self.name).map_err(fail)?;
        let stream = UnixStream::connect_addr(&address).map_err(fail)?;
        bound(&stream)?;
        let mut hello = [0; HELLO];
        hello[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        hello[4] = ask as u8;
        hello[8..24].copy_from_slice(self.token.as_bytes());
        send(&stream, &hello)?;
        Ok(stream)
    }

    /// The process at the other end, as the kernel numbers it here.
    pub(crate) fn peer_pid(&self) -> Option<u32> {
        let address = SocketAddr::from_abstract_name(&self.name).ok()?;
        let stream = UnixStream::connect_addr(&address).ok()?;
        let credentials = rustix::net::sockopt::socket_peercred(&stream).ok()?;
        u32::try_from(credentials.pid.as_raw_pid()).ok()
    }

    /// A data stream to the peer.
    pub(crate) fn stream(&self) -> Result<OwnedFd> {
        Ok(self.open(Ask::Stream)?.into())
    }

    /// Asks for regions; the answer is yet to be read.
    pub(crate) fn question<'a>(
        &self,
        ask: Ask,
        wanted: &[(RegionId, u64)],
        stopped: &'a dyn Fn() -> bool,
    ) -> Result<Reply<'a>> {
        let stream = self.open(ask)?;
        let mut question = Vec::with_capacity(4 + wanted.len() * 8);
        question.extend_from_slice(&(wanted.len() as u32).to_le_bytes());
        for (id, _) in wanted {
            question.extend_from_slice(&id.0.to_le_bytes());
        }
        send(&stream, &question)?;
        Ok(Reply::new(stream, stopped))
    }

    /// Maps the shared parts of these regions, populated, ready to read and write.
    pub(crate) fn map(&self, wanted: &[(RegionId, u64)]) -> Result<Vec<(RegionId, Mapped)>> {
        let mut reply = self.question(Ask::Regions, wanted, &|| false)?;
        let mut sizes: BTreeMap<RegionId, u64> = wanted.iter().copied().collect();
        let mut found = Vec::with_capacity(wanted.len());
        let mut answer = vec![0; FDS * ENTRY];
        loop {
            let (count, fds) = reply.piece(&mut answer)?;
            if answer[..count] == END {
                break;
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
                    let memory = HostRegion::map_peer_at(fd, word(entry, 24), len, true)?;
                    let memory = memory.into();
                    found.push((id, Mapped { memory, region_offset }));
                }
            }
        }
        Ok(found)
    }
}

/// Answers one connection on the local socket. Blocks, so it runs on a thread of its own.
pub(crate) fn answer(shared: &Arc<Shared>, stream: UnixStream) -> Result<()> {
    let credentials = rustix::net::sockopt::socket_peercred(&stream)
        .map_err(|error| refuse("the kernel names no user for the peer").with_source(std::io::Error::from(error)))?;
    let pid = u32::try_from(credentials.pid.as_raw_pid()).unwrap_or(0);
    let ours = rustix::process::geteuid();
    if credentials.uid != ours && !credentials.uid.is_root() {
        return Err(refuse("the peer runs as another user"));
    }
    bound(&stream)?;
    let mut hello = [0; HELLO];
    receive(&stream, &mut hello)?;
    let token = SessionToken::from_slice(&hello[8..24]).filter(|_| hello[0..4] == MAGIC.to_le_bytes());
    let peer = token
        .and_then(|token| shared.peer_of_token(token))
        .ok_or_else(|| refuse("the token is of no session"))?;
    match hello[4] {
        ask @ (0 | 2) => {
            // Whoever maps our memory can write it at any time, until it is gone.
            if !shared.watch_writer(peer, || Writer::process(pid)) {
                return Err(refuse("the peer's process can't be watched from here"));
            }
            if ask == 0 {
                give_regions(shared, peer, &stream)
            } else {
                lend(shared, peer, &stream)
            }
        }
        3 => look(shared, peer, &stream),
        1 => serve_stream(shared, peer, Socket::new(stream.into())?),
        _ => Err(refuse("the question is unknown")),
    }
}

/// The regions that a peer asks for, each once, however often it is named.
///
/// # Errors
/// `Handshake` when they are too many, `PeerLost` when it does not say in time.
pub(crate) fn asked_for(stream: &UnixStream) -> Result<BTreeSet<RegionId>> {
    let mut count = [0; 4];
    receive(stream, &mut count)?;
    let count = u32::from_le_bytes(count) as usize;
    if count > MAX_WANTED {
        return Err(refuse("too many regions are asked for"));
    }
    let mut ids = vec![0; count * 8];
    receive(stream, &mut ids)?;
    Ok(ids.chunks_exact(8).map(|id| RegionId(word(id, 0))).collect())
}

fn give_regions(shared: &Shared, peer: PeerKey, stream: &UnixStream) -> Result<()> {
    let regions: Vec<_> = asked_for(stream)?
        .into_iter()
        .filter_map(|id| shared.registry.region_for(peer, id).ok())
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
        pdkv_device::send_fds(stream.as_fd(), &fds, &entries)?;
    }
    send(stream, &END)
}

/// Bounds every step on this socket: the other end is a thread on this host.
fn bound(stream: &UnixStream) -> Result<()> {
    let set = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(STEP)));
    set.and_then(|()| stream.set_write_timeout(Some(STEP))).map_err(broken)
}

pub(crate) fn send(mut stream: &UnixStream, bytes: &[u8]) -> Result<()> {
    stream.write_all(bytes).map_err(broken)
}

fn receive(mut stream: &UnixStream, bytes: &mut [u8]) -> Result<()> {
    stream.read_exact(bytes).map_err(broken)
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

#[cfg(test)]
mod tests {
    use super::*;
    use pdkv_core::ErrorKind;
    use pdkv_device::HugePages;

    #[test]
    fn a_region_that_is_handed_out_twice_ends_the_mapping() {
        let (listener, name) = listen().unwrap();
        listener.set_nonblocking(false).unwrap();
        let owner = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut question = [0; HELLO + 4 + 8];
            receive(&stream, &mut question).unwrap();
            let memory = HostRegion::allocate(4096, HugePages::Never).unwrap();
            let mut entry = [0; ENTRY];
            entry[0] = 5;
            entry[16..24].copy_from_slice(&4096_u64.to_le_bytes());
            let fd = memory.shared().unwrap().fd;
            // Until the other end has had enough.
            let mut sent = 0;
            while pdkv_device::send_fds(stream.as_fd(), &[fd], &entry).is_ok() {
                sent += 1;
            }
            sent
        });
        let door = LocalDoor {
            name,
            token: SessionToken::new([1; 16]),
        };
        let error = door.map(&[(RegionId(5), 4096)]).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Handshake);
        assert!(owner.join().unwrap() > 0);
    }
}
