//! The receiving end as the engine and its owner share it: who reads, how far it is, and how it ends.

use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pdkv_core::id::{Incarnation, PeerKey};
use pdkv_core::pipe::ToSender;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::EventFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::guest::Guest;
use super::input::{Counted, Gulp, Input, Step};
use super::landing::Slabs;
use super::lobby::End;
use super::receiver::PipeItem;
use super::upward::Upward;
use super::{PipeStats, broken};
use crate::shared::Shared;

/// Why it is over, from elsewhere than the stream.
struct Cut {
    error: Error,
    /// What the stream still holds is not to be had any more.
    now: bool,
}

/// A receiving end, as its owner and the engine hold it.
pub(super) struct Incoming {
    pub(super) shared: Arc<Shared>,
    pub(super) peer: PeerKey,
    pub(super) name: String,
    pub(super) incarnation: Incarnation,
    same_host: bool,
    pub(super) channel: Vec<u8>,
    pub(super) stream: Arc<TcpStream>,
    /// Wakes whoever reads.
    wake: EventFd,
    cut: Mutex<Option<Cut>>,
    /// Here when nobody reads.
    desk: Mutex<Option<Box<Input>>>,
    free: Condvar,
    pub(super) up: Upward,
    slabs: Arc<Slabs>,
    pub(super) taken: AtomicU64,
    stats: Mutex<PipeStats>,
}

/// The right to read, until dropped.
struct Seat<'a> {
    pipe: &'a Incoming,
    input: Option<Box<Input>>,
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut input = self.input.take();
        let mut desk = self.pipe.lock_desk();
        // Whoever cut it while this thread read could not do it itself.
        if let Some(input) = &mut input
            && let Some(error) = self.pipe.cut_error()
        {
            self.pipe.leave_landing(input, &error);
        }
        *desk = input;
        drop(desk);
        self.pipe.free.notify_one();
    }
}

impl Incoming {
    pub(super) fn new(shared: &Arc<Shared>, guest: Guest, max_item_bytes: u64) -> Result<Self> {
        Ok(Self {
            shared: Arc::clone(shared),
            peer: guest.peer,
            name: guest.name,
            incarnation: guest.incarnation,
            same_host: guest.same_host,
            channel: guest.channel,
            stream: Arc::new(guest.stream),
            wake: EventFd::new()?,
            cut: Mutex::default(),
            desk: Mutex::new(Some(Box::new(Input::new(max_item_bytes)))),
            free: Condvar::new(),
            up: Upward::default(),
            slabs: Slabs::new(shared, guest.peer),
            taken: AtomicU64::new(0),
            stats: Mutex::default(),
        })
    }

    pub(super) fn stats(&self) -> PipeStats {
        *self.stats.lock().expect("no holder panics")
    }

    pub(super) fn lock_desk(&self) -> MutexGuard<'_, Option<Box<Input>>> {
        self.desk.lock().expect("no holder panics")
    }

    pub(super) fn cut_error(&self) -> Option<Error> {
        let cut = self.cut.lock().expect("no holder panics");
        cut.as_ref().map(|cut| cut.error.clone())
    }

    /// # Errors
    /// Why nothing is to be received any more, whatever came in.
    fn check_cut(&self) -> Result<()> {
        match &*self.cut.lock().expect("no holder panics") {
            Some(cut) if cut.now => Err(cut.error.clone()),
            _ => Ok(()),
        }
    }

    /// The pipe ended in the middle of a large item. The sender may be writing it still, until its own end of the
    /// stream closes.
    fn leave_landing(&self, input: &mut Input, error: &Error) {
        if let Some(landing) = input.landing.take() {
            input.done.get_or_insert_with(|| error.clone());
            if let Some(slab) = landing.slab {
                let memory = self.slabs.strike(slab);
                // From elsewhere nobody writes but through threads of ours, which hold the memory themselves.
                if self.same_host {
                    self.shared
                        .pipes
                        .quarantine(&self.shared, Arc::clone(&self.stream), memory);
                }
            }
        }
    }

    /// Takes the desk, if it gets free within `wait`.
    fn sit(&self, wait: Duration) -> Result<Option<Seat<'_>>> {
        let mut desk = self.lock_desk();
        let mut deadline = None;
        loop {
            if let Some(input) = desk.take() {
                return Ok(Some(Seat {
                    pipe: self,
                    input: Some(input),
                }));
            }
            self.check_cut()?;
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + wait);
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            desk = self.free.wait_timeout(desk, left).expect("no holder panics").0;
        }
    }

    /// The next item. With no `wait` only what was read before is looked at, and nothing that takes time is done.
    pub(super) fn receive(&self, wait: Option<Duration>) -> Result<Option<PipeItem>> {
        self.shared.check_process("recv")?;
        let Some(mut seat) = self.sit(wait.unwrap_or_default())? else {
            return Ok(None);
        };
        let Some(input) = seat.input.as_deref_mut() else {
            return Ok(None);
        };
        let deadline = wait.map(|wait| Instant::now() + wait);
        loop {
            self.check_cut()?;
            if let Some(error) = &input.done {
                return Err(error.clone());
            }
            match input.step(&self.slabs) {
                Ok(Step::Item(item, how)) => {
                    self.count(input, &how);
                    return Ok(Some(item));
                }
                Ok(Step::Place) if wait.is_none() => return Ok(None),
                Ok(Step::Place) => {
                    self.land(input)?;
                    continue;
                }
                Ok(Step::More) => {}
                Err(error) => return Err(self.finish(input, error)),
            }
            let Some(deadline) = deadline else { return Ok(None) };
            match input.read(&self.stream) {
                Ok(Gulp::Some) => continue,
                Ok(Gulp::Nothing) => {}
                Ok(Gulp::End) => return Err(self.finish(input, self.ended(input))),
                Err(error) => {
                    let lost = self.cut_error().unwrap_or_else(|| broken(error));
                    return Err(self.finish(input, lost));
                }
            }
            if let Some(error) = self.cut_error() {
                return Err(error);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.rest(left)?;
        }
    }

    /// The stream ended without a word.
    fn ended(&self, input: &Input) -> Error {
        let within = !input.is_empty() || input.landing.is_some();
        let place = if within {
            "in the middle of an item"
        } else {
            "between two items"
        };
        let lost = || {
            let text = format!("the sender `{}` is gone, {place}", self.name);
            Error::new(ErrorKind::PeerLost, "recv", text).with_hint("whoever ends in order closes the pipe first")
        };
        self.cut_error().unwrap_or_else(lost)
    }

    /// Nothing more can come. The sender's memory of this pipe ends with its stream, or with its last word.
    fn finish(&self, input: &mut Input, error: Error) -> Error {
        if matches!(error.kind(), ErrorKind::Integrity | ErrorKind::Capacity) {
            let refused = ToSender::Refused {
                kind: error.kind(),
                reason: error.message(),
            };
            self.up.say(&self.stream, &refused);
        }
        let error = input.done.get_or_insert(error).clone();
        if matches!(error.kind(), ErrorKind::Integrity) {
            self.leave_landing(input, &error);
        } else if let Some(slab) = input.landing.take().and_then(|landing| landing.slab) {
            drop(self.slabs.strike(slab));
        }
        self.slabs.close();
        error
    }

    /// Gives the item in the middle a place.
    ///
    /// # Errors
    /// `Capacity`, and then it may be tried again; what else ends the pipe.
    fn land(&self, input: &mut Input) -> Result<()> {
        let Some(landing) = &mut input.landing else {
            return Ok(());
        };
        let slab = match self.slabs.take(landing.nbytes) {
            Ok(slab) => slab,
            Err(error) if error.kind() == ErrorKind::Capacity => return Err(error),
            Err(error) => {
                let error = self.cut_error().unwrap_or(error);
                return Err(self.finish(input, error));
            }
        };
        let place = ToSender::Place {
            seq: landing.seq,
            region: slab.region().id,
            offset: 0,
        };
        landing.slab = Some(slab);
        self.up.say(&self.stream, &place);
        Ok(())
    }

    fn count(&self, input: &Input, how: &Counted) {
        let items = input.count();
        self.taken.store(items, Ordering::Release);
        {
            let mut stats = self.stats.lock().expect("no holder panics");
            stats.items = items;
            match *how {
                Counted::Inline(bytes) => {
                    stats.bytes += bytes;
                    stats.inline_bytes += bytes;
                }
                Counted::Placed(bytes) => {
                    stats.bytes += bytes;
                    stats.direct_bytes += bytes;
                }
            }
        }
        if let Some(due) = self.up.receipt(&self.stream, items, self.shared.clock.now()) {
            self.shared.pipes.arm(&self.shared, due);
        }
    }

    /// Sleeps until there is something to read or the pipe is cut.
    fn rest(&self, left: Duration) -> Result<()> {
        let wanted = if self.up.flush(&self.stream) {
            PollFlags::IN | PollFlags::OUT
        } else {
            PollFlags::IN
        };
        let mut fds = [
            PollFd::new(&*self.stream, wanted),
            PollFd::new(&self.wake, PollFlags::IN),
        ];
        let left = Timespec::try_from(left).ok();
        rustix::io::retry_on_intr(|| poll(&mut fds, left.as_ref()))
            .map(drop)
            .map_err(|errno| broken(errno.into()))
    }

    /// Ends it here and tells the sender; again is harmless.
    pub(super) fn close(&self, error: &Error) {
        if self.end(error, true) {
            let items = self.taken.load(Ordering::Acquire);
            self.up.say(&self.stream, &ToSender::Gone { items });
        }
    }

    fn end(&self, error: &Error, now: bool) -> bool {
        {
            let mut cut = self.cut.lock().expect("no holder panics");
            if cut.as_ref().is_some_and(|cut| cut.now || !now) {
                return false;
            }
            *cut = Some(Cut {
                error: error.clone(),
                now,
            });
        }
        self.wake.notify();
        if let Some(input) = &mut *self.lock_desk() {
            self.leave_landing(input, error);
        }
        self.free.notify_all();
        self.slabs.close();
        true
    }
}

impl End for Incoming {
    fn cut(&self, error: &Error) {
        self.end(error, false);
    }

    fn part(&self, error: &Error) {
        self.close(error);
    }

    fn tick(&self, now: Duration) -> Option<Duration> {
        self.up.tick(&self.stream, self.taken.load(Ordering::Acquire), now)
    }
}
