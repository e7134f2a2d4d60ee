//! A pipe that a peer has opened and nobody has accepted: how it comes, and what it is until somebody wants it.

use std::io::Read;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pdkv_core::id::{Incarnation, PeerKey};
use pdkv_core::pipe::{HEADER, MAX_CHANNEL, ToReceiver, ToSender};
use pdkv_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::upward::Upward;
use super::{broken, misplaced};
use crate::shared::Shared;

/// Pipes that one peer may have open and unaccepted.
const MAX_GUESTS: usize = 64;
/// How long a peer may take to say what its pipe is called.
const STEP: Duration = Duration::from_secs(5);

/// A pipe that nobody has accepted.
pub(crate) struct Guest {
    pub(super) peer: PeerKey,
    pub(super) name: String,
    pub(super) incarnation: Incarnation,
    pub(super) same_host: bool,
    pub(super) channel: Vec<u8>,
    pub(super) stream: TcpStream,
    /// Counts guests as they come.
    pub(super) number: u64,
    /// When its sender was found to have left.
    pub(super) left: Option<Duration>,
}

/// A peer has opened a pipe, and was told that it may go on after it had got its seat.
///
/// # Errors
/// `Capacity` when it has too many that wait, or the system gives no thread.
pub(crate) fn arrive(shared: &Arc<Shared>, seat: Result<Seat>, stream: TcpStream) -> Result<()> {
    let seat = seat.inspect_err(|error| refuse(&stream, error))?;
    shared.movers.task(move || {
        if let Err(error) = seat.welcome(stream) {
            tracing::debug!(%error, "a pipe was turned away");
        }
    })
}

/// Tells a sender why it is turned away, if the stream takes that now.
fn refuse(stream: &TcpStream, error: &Error) {
    let refused = ToSender::Refused {
        kind: error.kind(),
        reason: error.message(),
    };
    Upward::default().say(stream, &refused);
}

/// Whether the sender has given up already.
pub(super) fn has_hung_up(stream: &TcpStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec::default();
    poll(&mut fds, Some(&now)).is_ok_and(|count| count == 1)
}

/// A place among those that wait, given up when dropped.
pub(crate) struct Seat {
    shared: Arc<Shared>,
    peer: PeerKey,
    /// A guest is counted in its stead.
    handed_on: bool,
}

impl Seat {
    /// # Errors
    /// `Capacity` when the peer has too many.
    pub(crate) fn take(shared: &Arc<Shared>, peer: PeerKey) -> Result<Self> {
        let mut inner = shared.pipes.lock();
        if inner.counts.get(&peer).is_some_and(|&count| count >= MAX_GUESTS) {
            drop(inner.take(|guest| guest.peer == peer && has_hung_up(&guest.stream)));
        }
        let count = inner.counts.entry(peer).or_default();
        if *count >= MAX_GUESTS {
            let text = format!("the peer has `{MAX_GUESTS}` pipes that nobody has accepted");
            return Err(Error::new(ErrorKind::Capacity, "pipe", text));
        }
        *count += 1;
        Ok(Self {
            shared: Arc::clone(shared),
            peer,
            handed_on: false,
        })
    }

    /// Hears the pipe's name and lets it wait.
    fn welcome(mut self, stream: TcpStream) -> Result<()> {
        let channel = name_of(&stream)?;
        stream.set_nonblocking(true).map_err(broken)?;
        let peer = self.peer;
        let known = {
            let state = self.shared.lock();
            let entry = state.peers.get(&peer);
            entry.and_then(|entry| {
                Some((
                    entry.name.clone(),
                    entry.same_host,
                    state.node.remote(peer)?.incarnation,
                ))
            })
        };
        let lost = || Error::new(ErrorKind::PeerLost, "pipe", "the peer was lost meanwhile");
        let (name, same_host, incarnation) = known.ok_or_else(lost)?;
        let shared = Arc::clone(&self.shared);
        let pipes = &shared.pipes;
        {
            let mut inner = pipes.lock();
            inner.came += 1;
            let number = inner.came;
            inner.guests.push(Guest {
                peer,
                name,
                incarnation,
                same_host,
                channel,
                stream,
                number,
                left: None,
            });
            self.handed_on = true;
        }
        pipes.came.notify_all();
        // Lost since it was looked up: then nobody else would send the guest away.
        if !self.shared.lock().peers.contains_key(&peer) {
            pipes.end(peer, &lost());
        }
        Ok(())
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if !self.handed_on {
            let pipes = &self.shared.pipes;
            pipes.lock().uncount(self.peer);
            // Whoever waited for it to say its name waits no more.
            pipes.came.notify_all();
        }
    }
}

/// Reads the first frame, and not a byte more.
fn name_of(mut stream: &TcpStream) -> Result<Vec<u8>> {
    stream.set_nonblocking(false).map_err(broken)?;
    let deadline = Instant::now() + STEP;
    let mut raw = [0; HEADER + MAX_CHANNEL];
    let mut have = 0;
    let mut need = HEADER;
    loop {
        while have < need {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::new(
                    ErrorKind::PeerLost,
                    "pipe",
                    "the peer didn't say the pipe's name",
                ));
            }
            stream.set_read_timeout(Some(left)).map_err(broken)?;
            match stream.read(&mut raw[have..need]) {
                Ok(0) => return Err(Error::new(ErrorKind::PeerLost, "pipe", "the peer hung up")),
                Ok(count) => have += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(broken(error)),
            }
        }
        match ToReceiver::decode(&raw[..have])? {
            Some((ToReceiver::Open { channel }, _)) => return Ok(channel.to_vec()),
            Some((other, _)) => return Err(misplaced(other.name())),
            None => {
                let mut word = [0; 4];
                word.copy_from_slice(&raw[8..12]);
                // The header was found good, so the kind's bound holds; other kinds than a name may have more.
                need = HEADER + u32::from_le_bytes(word) as usize;
                if need > raw.len() {
                    return Err(misplaced("a frame that is no name"));
                }
            }
        }
    }
}
