//! What an engine keeps of its pipes: those that peers have opened and nobody has accepted, and the ends there are, so
//! that a lost peer ends them. Nobody who opens pipes can make it keep much, or for long.

use std::collections::BTreeMap;
use std::io::Read;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use pdkv_core::id::{Incarnation, PeerKey};
use pdkv_core::pipe::{HEADER, MAX_CHANNEL, ToReceiver, ToSender};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::HostRegion;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::upward::Upward;
use super::{broken, misplaced};
use crate::shared::{Shared, nanos};

/// Pipes that one peer may have open and unaccepted.
const MAX_GUESTS: usize = 64;
/// How long a peer may take to say what its pipe is called.
const STEP: Duration = Duration::from_secs(5);
/// How often memory that somebody may still be writing is looked at.
const WATCH: Duration = Duration::from_millis(500);

/// One end of a pipe, as the engine sees it.
pub(super) trait End: Send + Sync {
    /// The peer is lost or the engine closed: end it with this error.
    fn cut(&self, error: &Error);

    /// The engine is about to be closed: tell the other end in order, if this is the one that does.
    fn part(&self, error: &Error);

    /// Does what is due; when to come again.
    fn tick(&self, now: Duration) -> Option<Duration>;
}

/// A pipe that nobody has accepted.
pub(crate) struct Guest {
    pub(super) peer: PeerKey,
    pub(super) name: String,
    pub(super) incarnation: Incarnation,
    pub(super) same_host: bool,
    pub(super) channel: Vec<u8>,
    pub(super) stream: TcpStream,
}

#[derive(Default)]
struct Inner {
    guests: Vec<Guest>,
    /// Guests and those who have not said their name yet.
    counts: BTreeMap<PeerKey, usize>,
    ends: Vec<(PeerKey, Weak<dyn End>)>,
    /// Memory that a sender may be writing until its end of the stream closes.
    shut: Vec<Shut>,
}

/// Memory, and the stream whose end says that its sender writes no more.
type Shut = (Arc<TcpStream>, Arc<HostRegion>);

/// What engines that are gone could not give back: a sender that is stopped by a debugger, say, writes on when it goes
/// on, into whatever has the address then.
static LEFT: Mutex<Vec<Shut>> = Mutex::new(Vec::new());

/// Gives back what is left of engines that are gone, as far as its senders are gone too.
fn sweep() {
    let over: Vec<_> = LEFT
        .lock()
        .expect("no holder panics")
        .extract_if(.., |(stream, _)| is_over(stream))
        .collect();
    // Unmapped outside the lock.
    drop(over);
}

/// How many pieces of memory outlive their engines.
#[cfg(test)]
pub(super) fn left() -> usize {
    sweep();
    LEFT.lock().expect("no holder panics").len()
}

/// Whether the other end of a stream is closed.
fn is_over(mut stream: &TcpStream) -> bool {
    let mut scrap = [0; 4096];
    // What it still says is of no interest, and more than this comes another time.
    for _ in 0..64 {
        match stream.read(&mut scrap) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
        }
    }
    false
}

impl Drop for Inner {
    fn drop(&mut self) {
        sweep();
        if !self.shut.is_empty() {
            tracing::warn!(
                pieces = self.shut.len(),
                "memory is kept: its senders may still write it"
            );
            LEFT.lock().expect("no holder panics").append(&mut self.shut);
        }
    }
}

/// The pipes of one engine.
#[derive(Default)]
pub(crate) struct Pipes {
    inner: Mutex<Inner>,
    came: Condvar,
    /// When the progress thread has something to do here, in nanoseconds of the engine's clock; 0 is never.
    next: AtomicU64,
    threads: AtomicUsize,
}

/// A peer has opened a pipe.
///
/// # Errors
/// `Capacity` when it has too many that wait, or the system gives no thread.
pub(crate) fn arrive(shared: &Arc<Shared>, peer: PeerKey, stream: TcpStream) -> Result<()> {
    let seat = Seat::take(shared, peer).inspect_err(|error| refuse(&stream, error))?;
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
fn has_hung_up(stream: &TcpStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec::default();
    poll(&mut fds, Some(&now)).is_ok_and(|count| count == 1)
}

/// A place among those that wait, given up when dropped.
struct Seat {
    shared: Arc<Shared>,
    peer: PeerKey,
    /// A guest is counted in its stead.
    handed_on: bool,
}

impl Seat {
    fn take(shared: &Arc<Shared>, peer: PeerKey) -> Result<Self> {
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
            inner.guests.push(Guest {
                peer,
                name,
                incarnation,
                same_host,
                channel,
                stream,
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
            self.shared.pipes.lock().uncount(self.peer);
        }
    }
}

impl Inner {
    fn uncount(&mut self, peer: PeerKey) {
        if let Some(count) = self.counts.get_mut(&peer) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&peer);
            }
        }
    }

    /// Takes out the guests that `leaves` picks.
    fn take(&mut self, mut leaves: impl FnMut(&Guest) -> bool) -> Vec<Guest> {
        let taken: Vec<Guest> = self.guests.extract_if(.., |guest| leaves(guest)).collect();
        for guest in &taken {
            self.uncount(guest.peer);
        }
        taken
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

impl Pipes {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no holder panics")
    }

    /// Remembers an end, to be cut when the peer is lost.
    pub(super) fn enter<T: End + 'static>(&self, peer: PeerKey, end: &Arc<T>) {
        let end = Arc::clone(end) as Arc<dyn End>;
        let mut inner = self.lock();
        inner.ends.retain(|(_, end)| end.strong_count() > 0);
        inner.ends.push((peer, Arc::downgrade(&end)));
    }

    /// Accepts the oldest pipe of this name, from this life of an engine if one is named; `None` when none came
    /// within `wait`.
    pub(crate) fn accept(
        &self,
        shared: &Arc<Shared>,
        channel: &[u8],
        incarnation: Option<Incarnation>,
        wait: Duration,
    ) -> Result<Option<Guest>> {
        let fits = |guest: &Guest| guest.channel == channel && incarnation.is_none_or(|life| life == guest.incarnation);
        let deadline = Instant::now() + wait;
        let mut inner = self.lock();
        loop {
            shared.check_open("accept_pipe")?;
            // One whose sender has given up is taken only when there is no other: it has an end to tell, and no item.
            let alive = |guest: &Guest| fits(guest) && !has_hung_up(&guest.stream);
            let guests = &inner.guests;
            if let Some(at) = guests.iter().position(alive).or_else(|| guests.iter().position(fits)) {
                let guest = inner.guests.remove(at);
                inner.uncount(guest.peer);
                return Ok(Some(guest));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            inner = self.came.wait_timeout(inner, left).expect("no holder panics").0;
        }
    }

    /// Ends everything with a peer.
    pub(crate) fn end(&self, peer: PeerKey, error: &Error) {
        let mut inner = self.lock();
        let guests = inner.take(|guest| guest.peer == peer);
        let ends: Vec<_> = inner.ends.extract_if(.., |(key, _)| *key == peer).collect();
        drop(inner);
        drop(guests);
        for end in ends.into_iter().filter_map(|(_, end)| end.upgrade()) {
            end.cut(error);
        }
    }

    /// The engine is about to close: senders learn what was received, and why no more is.
    pub(crate) fn part(&self, error: &Error) {
        let ends: Vec<_> = self.lock().ends.iter().filter_map(|(_, end)| end.upgrade()).collect();
        for end in ends {
            end.part(error);
        }
    }

    /// The engine was closed: whoever waits to accept looks again.
    pub(crate) fn close(&self) {
        let guests = std::mem::take(&mut self.lock().guests);
        drop(guests);
        self.came.notify_all();
    }

    pub(super) fn thread_started(&self) {
        self.threads.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn thread_ended(&self) {
        self.threads.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether no thread of a pipe runs.
    pub(crate) fn none_runs(&self) -> bool {
        self.threads.load(Ordering::Acquire) == 0
    }

    /// Keeps memory until the other end of the stream is closed.
    pub(super) fn quarantine(&self, shared: &Arc<Shared>, stream: Arc<TcpStream>, memory: Arc<HostRegion>) {
        sweep();
        self.lock().shut.push((stream, memory));
        self.arm(shared, shared.clock.now() + WATCH);
    }

    /// Has [`tick`](Self::tick) called at `at`.
    pub(super) fn arm(&self, shared: &Shared, at: Duration) {
        let at = nanos(at);
        // Under this lock nobody is deciding how long to sleep.
        let state = shared.lock();
        let next = self.next.load(Ordering::Acquire);
        if next == 0 || at < next {
            self.next.store(at, Ordering::Release);
        }
        shared.wake_by(at);
        drop(state);
    }

    /// When the progress thread has something to do here.
    pub(crate) fn next_chore(&self) -> Option<Duration> {
        let next = self.next.load(Ordering::Acquire);
        (next != 0).then(|| Duration::from_nanos(next))
    }

    /// Does what is due: receipts, and memory that nobody writes any more.
    pub(crate) fn tick(&self, shared: &Arc<Shared>) {
        let now = shared.clock.now();
        if self.next_chore().is_none_or(|at| now < at) {
            return;
        }
        self.next.store(0, Ordering::Release);
        let ends: Vec<_> = self.lock().ends.iter().filter_map(|(_, end)| end.upgrade()).collect();
        let mut next = None;
        for end in ends {
            next = [next, end.tick(now)].into_iter().flatten().min();
        }
        let freed = self.unshut();
        if !self.lock().shut.is_empty() {
            next = [next, Some(now + WATCH)].into_iter().flatten().min();
        }
        if !freed.is_empty() {
            let _ = shared.movers.task(move || drop(freed));
        }
        if let Some(next) = next {
            self.arm(shared, next);
        }
    }

    /// Takes out the memory whose writers have closed their end.
    fn unshut(&self) -> Vec<Shut> {
        self.lock().shut.extract_if(.., |(stream, _)| is_over(stream)).collect()
    }

    /// Whether nobody can be writing into memory that receivers gave up.
    pub(crate) fn none_shut(&self) -> bool {
        drop(self.unshut());
        self.lock().shut.is_empty()
    }

    /// How many pieces of memory wait for their writers to be gone.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.lock().shut.len()
    }
}
