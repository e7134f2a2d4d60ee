//! What an engine keeps of its pipes: those that peers have opened and nobody has accepted, and the ends there are, so
//! that a lost peer ends them. Nobody who opens pipes can make it keep much, or for long.

use std::collections::BTreeMap;
use std::io::Read;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use pdkv_core::id::{Incarnation, PeerKey};
use pdkv_core::{Error, Result};
use pdkv_device::Memory;

use super::guest::{Guest, has_hung_up};
use crate::clock::nanos;
use crate::shared::Shared;

/// How long one that has left is kept from whoever waits for one that hasn't.
const GRACE: Duration = Duration::from_millis(100);
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

#[derive(Default)]
pub(super) struct Inner {
    pub(super) guests: Vec<Guest>,
    pub(super) came: u64,
    /// Guests and those who have not said their name yet.
    pub(super) counts: BTreeMap<PeerKey, usize>,
    ends: Vec<(PeerKey, Weak<dyn End>)>,
    /// Memory that a sender may be writing until its end of the stream closes.
    shut: Vec<Shut>,
}

/// Memory, and the stream whose end says that its sender writes no more.
type Shut = (Arc<TcpStream>, Memory);

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
    pub(super) came: Condvar,
    /// When the progress thread has something to do here, in nanoseconds of the engine's clock; 0 is never.
    next: AtomicU64,
    threads: AtomicUsize,
}

impl Inner {
    pub(super) fn uncount(&mut self, peer: PeerKey) {
        if let Some(count) = self.counts.get_mut(&peer) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&peer);
            }
        }
    }

    /// Whether the peer has a pipe that has not said its name yet.
    fn expects(&self, peer: PeerKey) -> bool {
        let named = self.guests.iter().filter(|guest| guest.peer == peer).count();
        self.counts.get(&peer).is_some_and(|&count| count > named)
    }

    /// Takes out the guests that `leaves` picks.
    pub(super) fn take(&mut self, mut leaves: impl FnMut(&Guest) -> bool) -> Vec<Guest> {
        let taken: Vec<Guest> = self.guests.extract_if(.., |guest| leaves(guest)).collect();
        for guest in &taken {
            self.uncount(guest.peer);
        }
        taken
    }
}

impl Pipes {
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
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
    /// within `wait`. One whose sender has left already comes last; with no `wait` it is taken like any other.
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
        let mut waited = false;
        loop {
            shared.check_open("accept_pipe")?;
            let mut left = deadline.saturating_duration_since(Instant::now());
            let alive = |guest: &Guest| fits(guest) && !has_hung_up(&guest.stream);
            if let Some(at) = inner.guests.iter().position(alive) {
                let guest = inner.guests.remove(at);
                inner.uncount(guest.peer);
                // Those before it that were given up are of no use to anybody.
                drop(inner.take(|other| other.number < guest.number && fits(other) && has_hung_up(&other.stream)));
                return Ok(Some(guest));
            }
            if waited && left.is_zero() {
                return Ok(None);
            }
            // One whose sender has left has an end to tell and no item. It may have a successor on its way.
            let now = shared.clock.now();
            if let Some(at) = inner.guests.iter().position(fits) {
                let until = *inner.guests[at].left.get_or_insert(now) + GRACE;
                // However long the thread that hears its name is held up, the successor is waited for.
                let coming = inner.expects(inner.guests[at].peer);
                if wait.is_zero() || (now >= until && !coming) {
                    let guest = inner.guests.remove(at);
                    inner.uncount(guest.peer);
                    return Ok(Some(guest));
                }
                if !coming {
                    left = left.min(until.saturating_sub(now));
                }
            }
            if left.is_zero() {
                return Ok(None);
            }
            inner = self.came.wait_timeout(inner, left).expect("no holder panics").0;
            waited = true;
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
    pub(super) fn quarantine(&self, shared: &Arc<Shared>, stream: Arc<TcpStream>, memory: Memory) {
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
