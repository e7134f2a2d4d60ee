//! The data streams of one link, and who waits for one. Decides from what it is told alone: it opens nothing, starts nothing and has no
//! clock.
//!
//! An owner lets a peer have so many streams and no more, so the link has at most as many, and all transfers share them: first come, first
//! served. Work waits in the queue without a thread. Streams are used by hands, threads that take one piece of work after the other for as
//! long as some waits.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long nobody dials again after the owner, or the system, gave one stream less than wanted.
const PAUSE: Duration = Duration::from_millis(100);
/// How long work waits while the owner takes no stream at all.
const PATIENCE: Duration = Duration::from_secs(5);

/// Something that waits for a stream.
pub(super) trait Waiter {
    /// Whether a stream would be of use to it: it is not ended, and not done by others.
    fn wanted(&self) -> bool;
}

/// One that can be used again.
pub(super) trait Usable {
    /// Whether the other end is still there.
    fn is_usable(&self) -> bool;
}

/// A place in the queue.
#[derive(Debug)]
pub(super) struct Place<W> {
    pub(super) waiter: W,
    /// Counts places as they are taken.
    number: u64,
    since: Instant,
}

/// What a hand does next.
#[derive(Debug)]
pub(super) enum Next<W> {
    /// Serve this one, with the stream it holds now.
    Serve(Place<W>),
    /// Open a stream. Whoever came before this number waits for it.
    Dial(u64),
    /// There is work and no stream to be had now, and nobody else who looks after it.
    Look,
    /// Nothing: the hand is one no more.
    Over,
}

pub(super) struct Pool<S, W> {
    /// Streams that may be open.
    most: usize,
    /// Of them those that are kept while nobody uses them.
    keep: usize,
    idle: Vec<S>,
    /// Threads that hold a stream, or are about to.
    hands: usize,
    /// Of them those that hold one.
    holding: usize,
    /// Of them those that are opening one.
    dialing: usize,
    queue: VecDeque<Place<W>>,
    came: u64,
    paused: Option<Instant>,
    /// Since when no stream is to be had; `None` while there is one, or nobody has tried.
    barred: Option<Instant>,
    /// Somebody looks after those that wait until there are none.
    pub(super) ushered: bool,
    closed: bool,
}

impl<S: Usable, W: Waiter> Pool<S, W> {
    pub(super) fn new(most: usize, keep: usize) -> Self {
        Self {
            most,
            keep,
            idle: Vec::new(),
            hands: 0,
            holding: 0,
            dialing: 0,
            queue: VecDeque::new(),
            came: 0,
            paused: None,
            barred: None,
            ushered: false,
            closed: false,
        }
    }

    /// At the end of the queue.
    pub(super) fn join(&mut self, waiter: W, now: Instant) {
        let number = self.came;
        self.came += 1;
        self.queue.push_back(Place {
            waiter,
            number,
            since: now,
        });
    }

    /// At its head once more: its stream failed it. `refused` when that was its owner's way to say that it takes no more of them.
    pub(super) fn rejoin(&mut self, place: Place<W>, refused: bool, now: Instant) {
        self.queue.push_front(place);
        if refused {
            self.paused = Some(now + PAUSE);
        }
    }

    /// How many hands are to be started, which count from now on.
    pub(super) fn hire(&mut self, now: Instant) -> usize {
        // Those that come will serve one each.
        let coming = self.hands - self.holding;
        let mut wanted = self.queue.len().saturating_sub(coming);
        if self.is_paused(now) {
            wanted = wanted.min(self.idle.len().saturating_sub(coming));
        }
        let hired = wanted.min(self.most - self.hands);
        self.hands += hired;
        hired
    }

    /// Some hands could not be started.
    pub(super) fn dismiss(&mut self, hands: usize) {
        self.hands -= hands;
    }

    /// Whether anybody will come to those that wait.
    pub(super) fn is_attended(&self) -> bool {
        self.hands > 0
    }

    /// Whether some may wait for so long that somebody must see when they are ended.
    pub(super) fn needs_usher(&self) -> bool {
        let coming = self.hands - self.holding;
        !self.ushered && !self.queue.is_empty() && (self.queue.len() > coming || self.idle.len() < coming)
    }

    /// What a hand does next, with the stream that it holds, if any. `gone` takes those who want none any more.
    pub(super) fn next(&mut self, held: &mut Option<S>, gone: &mut Vec<W>, now: Instant) -> Next<W> {
        self.drop_unwanted_heads(gone);
        if self.queue.is_empty() {
            self.hands -= 1;
            if let Some(stream) = held.take() {
                self.holding -= 1;
                if !self.closed && self.idle.len() < self.keep {
                    self.idle.push(stream);
                }
            }
            return Next::Over;
        }
        while held.is_none()
            && let Some(stream) = self.idle.pop()
        {
            if stream.is_usable() {
                *held = Some(stream);
                self.holding += 1;
            }
        }
        if held.is_none() {
            if !self.is_paused(now) {
                self.dialing += 1;
                return Next::Dial(self.came);
            }
            if !self.ushered {
                return Next::Look;
            }
            self.hands -= 1;
            return Next::Over;
        }
        self.queue.pop_front().map_or(Next::Look, Next::Serve)
    }

    /// A stream was opened; the hand holds it.
    pub(super) fn dialed(&mut self) {
        self.dialing -= 1;
        self.holding += 1;
        self.paused = None;
        self.barred = None;
    }

    /// No stream was opened, `crowded` if only for now: there are too many. Who waits for those that are there goes on waiting; where there
    /// is none, says who of them waits in vain. `before` is the number of [`Next::Dial`].
    pub(super) fn not_dialed(&mut self, before: u64, crowded: bool, now: Instant) -> Vec<W> {
        self.dialing -= 1;
        let others = self.holding + self.dialing + self.idle.len() > 0;
        if others || crowded {
            self.paused = Some(now + PAUSE);
        }
        // While there were some, it was those that were waited for.
        let none = self.holding + self.idle.len() == 0;
        let barred = self.barred.unwrap_or(now);
        self.barred = none.then_some(barred);
        if others {
            return Vec::new();
        }
        self.take_out(|place| {
            if crowded {
                now.saturating_duration_since(place.since.max(barred)) >= PATIENCE
            } else {
                place.number < before
            }
        })
    }

    /// The hand opened none because nobody waited any more.
    pub(super) fn not_wanted(&mut self) {
        self.dialing -= 1;
    }

    /// The stream that a hand held is gone. Whether there are others.
    pub(super) fn lost(&mut self) -> bool {
        self.holding -= 1;
        self.holding + self.dialing + self.idle.len() > 0
    }

    /// Takes out those who want no stream any more.
    pub(super) fn sweep(&mut self) -> Vec<W> {
        let closed = self.closed;
        self.take_out(|place| closed || !place.waiter.wanted())
    }

    /// Takes out some of those who wait.
    pub(super) fn take_out(&mut self, mut chosen: impl FnMut(&Place<W>) -> bool) -> Vec<W> {
        let (out, kept): (VecDeque<_>, VecDeque<_>) = self.queue.drain(..).partition(|place| chosen(place));
        self.queue = kept;
        out.into_iter().map(|place| place.waiter).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether nobody waits for what is being dialed.
    pub(super) fn is_over(&self) -> bool {
        self.closed || self.queue.is_empty()
    }

    /// No stream is used any more, and nobody gets one.
    pub(super) fn close(&mut self) -> Vec<S> {
        self.closed = true;
        std::mem::take(&mut self.idle)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.paused.is_some_and(|until| now < until)
    }

    fn drop_unwanted_heads(&mut self, gone: &mut Vec<W>) {
        while let Some(head) = self.queue.front()
            && (self.closed || !head.waiter.wanted())
        {
            gone.extend(self.queue.pop_front().map(|place| place.waiter));
        }
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
