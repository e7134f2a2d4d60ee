//! The initiator's end of the data streams: one pool of them for all transfers from the peer, and the threads that use it.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pdkv_core::capability::Capability;
use pdkv_core::gpu_memory::GpuMemory;
use pdkv_core::id::PeerKey;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Stop;

use super::pages::Stagings;
use super::pool::{Next, Place, Pool, Usable, Waiter};
use super::socket::{MAX_STREAMS, Socket};
use super::stream::Stream;
use crate::lists::{Memories, Regions};
use crate::mover::{Movers, contained};
use crate::raw::Raw;
use crate::transport::{Link, Work};

/// Streams that may be open at once: half of what an owner lets a peer have, for it may be slow to see that one is closed.
/// No fewer than one transfer may use.
const MAX_OPEN: usize = MAX_STREAMS / 2;
/// Idle streams kept for the next transfer, on top of what one transfer uses; each is a thread at the owner.
const SPARE: usize = 8;
/// How often a piece of work is begun anew on another stream where there is no other.
const TRIES: usize = 3;
/// How long words on the control channel are waited for where the end of a stream says less.
const WORD: Duration = Duration::from_secs(1);
/// How long work that waits and has ended is not seen, at the most.
const LOOK: Duration = Duration::from_millis(20);

/// How to open one more stream to the peer.
pub(crate) trait Dial: Send + Sync {
    /// Opens it, unless told to stop meanwhile.
    ///
    /// # Errors
    /// `Capacity` when the owner takes no more of them, or the system doesn't.
    fn open(&self, stop: &dyn Stop) -> Result<Socket>;
}

pub(crate) struct TcpLink {
    peer: PeerKey,
    streams: usize,
    family: &'static str,
    dial: Box<dyn Dial>,
    pool: Mutex<Pool<Opened, Piece>>,
    movers: Arc<Movers>,
    stagings: Arc<Stagings>,
}

/// An open stream.
struct Opened {
    socket: Socket,
    /// The owner has answered on it.
    proven: bool,
}

impl Usable for Opened {
    fn is_usable(&self) -> bool {
        !self.socket.is_gone()
    }
}

/// What one stream at a time does for a transfer; it calls [`Work::leave`] once.
struct Piece {
    work: Arc<Work>,
    /// Units that a stream failed to bring, so that this piece has to, and how.
    again: Vec<Range<u64>>,
    failure: Option<Error>,
    tries: usize,
}

impl Waiter for Piece {
    fn wanted(&self) -> bool {
        let ended = self.work.stopped() || self.work.failed();
        !ended && (!self.again.is_empty() || self.work.is_unclaimed())
    }
}

impl Piece {
    fn fail(self, error: Error) {
        self.work.fail(self.failure.unwrap_or(error));
        self.work.leave();
    }
}

/// Ends the opening of a stream that nobody waits for any more.
struct Unwanted<'a>(&'a TcpLink);

impl Stop for Unwanted<'_> {
    fn stopped(&self) -> bool {
        self.0.pool().is_over()
    }
}

/// Somebody looks after those that wait. Where that ends before its time, the next one does.
struct Ushering<'a>(&'a TcpLink);

impl Drop for Ushering<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.pool.lock().unwrap_or_else(PoisonError::into_inner).ushered = false;
        }
    }
}

impl TcpLink {
    pub(crate) fn new(
        peer: PeerKey,
        streams: usize,
        family: &'static str,
        dial: Box<dyn Dial>,
        movers: Arc<Movers>,
        stagings: Arc<Stagings>,
    ) -> Self {
        Self {
            peer,
            streams,
            family,
            dial,
            pool: Mutex::new(Pool::new(MAX_OPEN, streams + SPARE)),
            movers,
            stagings,
        }
    }

    fn pool(&self) -> MutexGuard<'_, Pool<Opened, Piece>> {
        self.pool.lock().expect("no holder panics")
    }

    /// Starts so many hands, or as many as the system has threads for.
    fn hire(self: &Arc<Self>, hands: usize) -> Result<()> {
        for started in 0..hands {
            let link = Arc::clone(self);
            self.movers
                .task(move || link.serve())
                .inspect_err(|_| self.pool().dismiss(hands - started))?;
        }
        Ok(())
    }

    /// Sees to it that somebody looks after those that wait.
    fn usher(self: &Arc<Self>) -> Result<()> {
        if std::mem::replace(&mut self.pool().ushered, true) {
            return Ok(());
        }
        let link = Arc::clone(self);
        self.movers
            .task(move || link.look_after())
            .inspect_err(|_| self.pool().ushered = false)
    }

    /// Lets go of those that wait and have ended, and has streams opened again after a pause, until nobody waits.
    fn look_after(self: &Arc<Self>) {
        let _ushering = Ushering(self);
        loop {
            let (gone, over, hands) = {
                let mut pool = self.pool();
                let gone = pool.sweep();
                let over = pool.is_empty();
                pool.ushered = !over;
                (gone, over, pool.hire(Instant::now()))
            };
            self.dismiss(gone);
            // Those that found no thread now find one at another look, or end in time.
            let _ = self.hire(hands);
            if over {
                return;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// One hand: serves those that wait, one after the other, with one stream as long as it holds.
    fn serve(self: &Arc<Self>) {
        let mut held = None;
        let mut served: Option<Served> = None;
        loop {
            let mut gone = Vec::new();
            let next = self.pool().next(&mut held, &mut gone, Instant::now());
            // Only now, when others may have the stream: whoever hears of an end may begin anew at once.
            if let Some(Served { work, spoilt }) = served.take() {
                work.leave();
                if spoilt.is_some() {
                    await_that(|| work.stopped() || !work.has_hands());
                }
            }
            self.dismiss(gone);
            match next {
                Next::Serve(place) => served = self.attend(&mut held, place),
                Next::Dial(before) => held = self.open(before),
                // Whoever can't have it seen to does it himself.
                Next::Look => {
                    if self.usher().is_err() {
                        std::thread::sleep(LOOK);
                        let swept = self.pool().sweep();
                        self.dismiss(swept);
                    }
                }
                Next::Over => return,
            }
        }
    }

    /// They want no stream any more.
    fn dismiss(&self, gone: Vec<Piece>) {
        let closed = self.pool().is_closed();
        for piece in gone {
            if closed && !piece.work.stopped() {
                let error = Error::new(ErrorKind::PeerLost, "tcp", "the peer was lost meanwhile");
                piece.fail(error);
            } else {
                piece.work.leave();
            }
        }
    }

    fn open(self: &Arc<Self>, before: u64) -> Option<Opened> {
        // Without, whoever waits is not let go before the peer has answered or its time is over.
        let _ = self.usher();
        // A hand that panics goes on: others wait for it, and it counts among few.
        match contained(|| self.dial.open(&Unwanted(self))).flatten() {
            Ok(socket) => {
                self.pool().dialed();
                Some(Opened { socket, proven: false })
            }
            Err(error) if error.kind() == ErrorKind::TransferCancelled => {
                self.pool().not_wanted();
                None
            }
            Err(error) => {
                let crowded = error.kind() == ErrorKind::Capacity;
                let in_vain = self.pool().not_dialed(before, crowded, Instant::now());
                for piece in in_vain {
                    piece.fail(error.clone());
                }
                None
            }
        }
    }

    /// Moves for one piece of work until it is used up, then keeps the stream; after a failure the stream is closed, for it may be in the
    /// middle of a frame. Says who is to be told that nobody touches memory for it any more.
    fn attend(&self, held: &mut Option<Opened>, mut place: Place<Piece>) -> Option<Served> {
        let mut opened = held.take()?;
        let work = Arc::clone(&place.waiter.work);
        let again = std::mem::take(&mut place.waiter.again);
        let mut stream = Stream::new(&opened.socket, &self.stagings, self.peer, &work, again);
        let outcome = contained(|| stream.run()).flatten();
        opened.proven |= stream.is_answered();
        let Err(error) = outcome else {
            *held = Some(opened);
            return Some(Served { work, spoilt: None });
        };
        let unanswered = stream.into_unanswered();
        let proven = opened.proven;
        let broke = error.kind() == ErrorKind::PeerLost;
        // What went wrong here is told before the stream ends, or the owner might tell of its end first.
        let spoilt = (!broke).then_some(opened);
        if broke && unanswered.is_none() && !Raw::owns(work.id()) {
            // The same the other way round: its word says more than the end of its stream does.
            await_that(|| work.stopped());
        }
        let mut pool = self.pool();
        let others = pool.lost();
        place.waiter.tries += 1;
        // That it broke says nothing of the peer yet: an owner of an older release ends what is too much for it, and networks forget streams
        // that rest. A peer that is lost fails the next one, too.
        if broke
            && (others || place.waiter.tries < TRIES)
            && let Some(again) = unanswered
        {
            place.waiter.again = again;
            place.waiter.failure.get_or_insert(error);
            pool.rejoin(place, !proven, Instant::now());
            return None;
        }
        drop(pool);
        work.fail(error);
        Some(Served { work, spoilt })
    }
}

/// Work for which a hand has done what it could.
struct Served {
    work: Arc<Work>,
    /// A stream that ends in the middle of a frame, once the end of the work has been told.
    spoilt: Option<Opened>,
}

/// Which of two streams is read first is chance: what comes by the control channel is waited for, for a while. Blocks.
fn await_that(come: impl Fn() -> bool) {
    let started = Instant::now();
    while !come() && started.elapsed() < WORD {
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Link for TcpLink {
    fn capability(&self) -> Capability {
        let able = Capability::sockets();
        match self.stagings.usable() {
            Ok(()) => able,
            Err(_) => Capability {
                gpu: GpuMemory::Refused,
                ..able
            },
        }
    }

    fn capability_between(&self, local: &Memories, remote: &Regions) -> Capability {
        if staged(local, remote) {
            self.capability().staged()
        } else {
            self.capability()
        }
    }

    fn detail(&self) -> String {
        format!("{} {} streams", self.streams, self.family)
    }

    fn reaches(&self, local: &Memories, remote: &Regions) -> Result<(), String> {
        if staged(local, remote) {
            return self.stagings.usable();
        }
        Ok(())
    }

    fn start(self: Arc<Self>, work: Arc<Work>) {
        let pieces = self
            .streams
            .min(usize::try_from(work.turns()).unwrap_or(usize::MAX))
            .max(1);
        work.employ(pieces);
        let hands = {
            let now = Instant::now();
            let mut pool = self.pool();
            for _ in 0..pieces {
                let piece = Piece {
                    work: Arc::clone(&work),
                    again: Vec::new(),
                    failure: None,
                    tries: 0,
                };
                pool.join(piece, now);
            }
            pool.hire(now)
        };
        // Where somebody comes all the same, that is enough.
        let hired = self
            .hire(hands)
            .or_else(|error| self.pool().is_attended().then_some(()).ok_or(error));
        let unseen = self.pool().needs_usher();
        if let Err(error) = hired.and_then(|()| if unseen { self.usher() } else { Ok(()) }) {
            let waiting = self.pool().take_out(|place| Arc::ptr_eq(&place.waiter.work, &work));
            for piece in waiting {
                piece.fail(error.clone());
            }
        }
    }

    fn ready_inline(&self, _work: &Work) -> bool {
        false
    }

    fn run_inline(self: Arc<Self>, work: &Arc<Work>) {
        self.start(Arc::clone(work));
    }

    fn shut_down(&self) {
        // Those that wait are let go by whoever looks after them: here others may hold locks.
        let idle = self.pool().close();
        drop(idle);
    }
}

/// Whether bytes go through pinned memory at one of the ends.
fn staged(local: &Memories, remote: &Regions) -> bool {
    local.any_device() || remote.any_device()
}
