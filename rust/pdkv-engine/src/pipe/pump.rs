//! The thread of a sending end: takes what is queued to the stream, hears what the receiver says, and has large items
//! written to where the receiver wants them. When it is gone, nothing of this pipe touches memory any more; the end of
//! its stream tells the receiver so.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pdkv_core::id::RegionId;
use pdkv_core::pipe::{ToReceiver, ToSender};
use pdkv_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::queue::{Large, Next};
use super::sender::Outgoing;
use super::source::Source;
use super::{broken, closed_there, misplaced};
use crate::remote::RemoteRegion;

/// How long the advert of a region may take after the receiver has named it: it comes over another stream.
const ADVERT: Duration = Duration::from_secs(10);
/// How long receipts are waited for once the session is over.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// Bytes read at once of what the receiver says.
const GULP: usize = 4 << 10;

/// Starts the thread; `hello` is the first thing it sends.
///
/// # Errors
/// `Capacity` when the system gives no thread.
pub(super) fn start(core: &Arc<Outgoing>, stream: TcpStream, hello: Vec<u8>) -> Result<()> {
    /// However the thread ends, whoever waits learns of it.
    struct Over(Arc<Outgoing>);
    impl Drop for Over {
        fn drop(&mut self) {
            if std::thread::panicking() {
                let text = "the thread of the pipe panicked";
                self.0.queue.fail(Error::new(ErrorKind::Internal, "pipe", text));
            }
            self.0.queue.set_over();
            self.0.shared.pipes.thread_ended();
        }
    }
    core.shared.pipes.thread_started();
    let over = Over(Arc::clone(core));
    crate::mover::spawn("pdkv-pipe", move || {
        let over = over;
        let mut pump = Pump {
            core: &over.0,
            stream,
            input: Vec::new(),
            asks: None,
            place: None,
            within: false,
        };
        if let Err(error) = pump.run(&hello) {
            tracing::debug!(%error, "pipe ended");
            // First, for the other end may answer the farewell by ending the session.
            over.0.queue.fail(error.clone());
            pump.part(&error);
        }
    })
}

/// Where the receiver wants an item.
struct Place {
    region: RegionId,
    offset: u64,
}

struct Pump<'a> {
    core: &'a Arc<Outgoing>,
    stream: TcpStream,
    /// What the receiver has said and nobody has read.
    input: Vec<u8>,
    /// The item that is waiting for its place.
    asks: Option<u64>,
    place: Option<Place>,
    /// Part of a frame went out, the rest did not.
    within: bool,
}

impl Pump<'_> {
    fn run(&mut self, hello: &[u8]) -> Result<()> {
        self.write(hello)?;
        let mut source = Source::default();
        loop {
            match self.core.queue.next() {
                Next::Send(chunk) => {
                    self.write(&chunk.bytes)?;
                    self.core.queue.sent(chunk);
                }
                Next::Place(large) => self.put(large, &mut source)?,
                Next::Bye { items } => {
                    self.say(&ToReceiver::Bye { items })?;
                    let _ = self.stream.shutdown(Shutdown::Write);
                    return Ok(());
                }
                Next::Rest => self.wait(false)?,
                Next::Over => self.check()?,
            }
            self.hear()?;
        }
    }

    /// # Errors
    /// Why it is over, when somebody else ended it.
    fn check(&mut self) -> Result<()> {
        if let Some(error) = self.core.queue.failure() {
            return Err(error);
        }
        if let Some(error) = self.core.queue.cut_error() {
            self.hear_last_words();
            return Err(error);
        }
        Ok(())
    }

    /// The session is over. Receipts may still be on their way: what was received in time is no loss.
    fn hear_last_words(&mut self) {
        let deadline = Instant::now() + LAST_WORDS;
        while self.core.queue.owes() && self.hear().is_ok() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let left = Timespec::try_from(left).ok();
            let _ = poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], left.as_ref());
        }
    }

    fn say(&mut self, frame: &ToReceiver<'_>) -> Result<()> {
        let mut raw = Vec::new();
        frame.encode(&mut raw)?;
        self.write(&raw)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let mut sent = 0;
        while sent < bytes.len() {
            match (&self.stream).write(&bytes[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(error) if error.kind() == IoKind::WouldBlock => {
                    self.within = sent > 0;
                    self.wait(true)?;
                    self.check()?;
                    self.hear()?;
                }
                Err(error) => {
                    self.within = true;
                    // It may have said why before it hung up.
                    self.hear()?;
                    return Err(broken(error));
                }
            }
        }
        self.within = false;
        Ok(())
    }

    /// Sleeps until the receiver speaks, somebody wakes this thread, or, if `room`, the stream takes more.
    fn wait(&self, room: bool) -> Result<()> {
        let wanted = if room {
            PollFlags::IN | PollFlags::OUT
        } else {
            PollFlags::IN
        };
        let mut fds = [
            PollFd::new(&self.stream, wanted),
            PollFd::new(&self.core.queue.wake, PollFlags::IN),
        ];
        let slept = rustix::io::retry_on_intr(|| poll(&mut fds, None));
        self.core.queue.rise();
        slept.map(drop).map_err(|errno| broken(errno.into()))
    }

    /// Reads what the receiver has said by now.
    fn hear(&mut self) -> Result<()> {
        let mut gulp = [0; GULP];
        loop {
            self.understand()?;
            match (&self.stream).read(&mut gulp) {
                Ok(0) => {
                    self.core.link.check_alive()?;
                    let text = "the receiver's end of the pipe is gone";
                    return Err(Error::new(ErrorKind::PeerLost, "pipe", text));
                }
                Ok(count) => self.input.extend_from_slice(&gulp[..count]),
                Err(error) if error.kind() == IoKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(error) => {
                    self.core.link.check_alive()?;
                    return Err(broken(error));
                }
            }
        }
    }

    fn understand(&mut self) -> Result<()> {
        let mut used = 0;
        while let Some((frame, len)) = ToSender::decode(&self.input[used..])? {
            used += len;
            match frame {
                ToSender::Received { items } => self.core.queue.received(items)?,
                ToSender::Gone { items } => {
                    self.core.queue.received(items)?;
                    return Err(closed_there("send", "the receiver has closed the pipe"));
                }
                ToSender::Refused { kind, reason } => {
                    let text = format!("the receiver ended the pipe: {reason}");
                    return Err(Error::new(kind, "pipe", text));
                }
                ToSender::Place { seq, region, offset } if self.asks == Some(seq) => {
                    self.asks = None;
                    self.place = Some(Place { region, offset });
                }
                ToSender::Place { .. } => return Err(misplaced(frame.name())),
            }
        }
        self.input.drain(..used);
        Ok(())
    }

    /// Has a large item written to where the receiver wants it.
    fn put(&mut self, large: Large, source: &mut Source) -> Result<()> {
        self.asks = Some(large.seq);
        self.write(&large.frame)?;
        let place = loop {
            if let Some(place) = self.place.take() {
                break place;
            }
            self.wait(false)?;
            self.check()?;
            self.hear()?;
        };
        let region = self.region(&place, &large)?;
        let moved = source.write(self.core, &large, &region, place.offset)?;
        let seq = large.seq;
        // First, so that whoever has the item finds it counted, and its memory let go.
        self.core.queue.placed(large, moved.staged);
        self.say(&ToReceiver::Placed { seq })
    }

    /// The receiver's region, once its advert is here.
    fn region(&mut self, place: &Place, large: &Large) -> Result<Arc<RemoteRegion>> {
        let deadline = Instant::now() + ADVERT;
        let region = loop {
            if let Some(region) = self.core.link.remote.region_to_come(place.region) {
                break region;
            }
            self.check()?;
            self.hear()?;
            self.core.link.check_alive()?;
            if !self.core.link.remote.awaits(place.region) || Instant::now() > deadline {
                let text = format!(
                    "the receiver names region `{}`, which it hasn't advertised",
                    place.region
                );
                return Err(Error::new(ErrorKind::Integrity, "pipe", text));
            }
        };
        let end = place.offset.checked_add(large.at.nbytes());
        if !region.raw_access || end.is_none_or(|end| end > region.len()) {
            let text = format!(
                "the receiver wants the item in region `{}`, where it can't be",
                place.region
            );
            return Err(Error::new(ErrorKind::Integrity, "pipe", text));
        }
        Ok(region)
    }

    /// Tells the receiver why this is the end, if it can still be told.
    fn part(&mut self, error: &Error) {
        if !self.within {
            let mut raw = Vec::new();
            let reason = error.message();
            // A closed pipe is one that has said goodbye; this one is lost.
            let kind = match error.kind() {
                ErrorKind::Closed => ErrorKind::PeerLost,
                kind => kind,
            };
            let failed = ToReceiver::Failed { kind, reason };
            if failed.encode(&mut raw).is_ok() {
                // A stream that takes no more has a receiver that doesn't read; the end of it will do.
                let _ = (&self.stream).write(&raw);
            }
        }
        let _ = self.stream.shutdown(Shutdown::Write);
        // What is left unread would turn the end into a reset, which may overtake what was sent.
        let mut scrap = [0; GULP];
        while matches!((&self.stream).read(&mut scrap), Ok(1..)) {}
    }
}
