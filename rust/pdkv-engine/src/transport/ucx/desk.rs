//! Where a lane's thread sits: it lets UCX work, listens to the side channel, and sleeps when neither has
//! anything to do. After something happened it polls for a moment before it sleeps, as the progress
//! thread does.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_ucx::Worker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::codec::Frame;
use super::control::Control;
use super::socket::LaneSocket;
use crate::shared::Shared;

/// Frames that are taken in before any is acted on; a peer that says more waits.
const MAX_BACKLOG: usize = 256;
/// How long one look at the flags of transfers may be delayed.
const SLICE: Duration = Duration::from_millis(20);

pub(super) struct Desk {
    pub(super) shared: Arc<Shared>,
    pub(super) control: Arc<Control>,
    socket: LaneSocket,
    /// Frames that came while the thread was busy with something else.
    backlog: VecDeque<Frame>,
    /// How the channel ended, to be told after its last frame.
    broken: Option<Error>,
    awake_until: Instant,
}

impl Desk {
    /// # Errors
    /// `PeerLost` when the stream is of no use.
    pub(super) fn new(shared: &Arc<Shared>, control: &Arc<Control>, stream: TcpStream) -> Result<Self> {
        let stream = Arc::new(stream);
        control.attach(&stream);
        Ok(Self {
            shared: Arc::clone(shared),
            control: Arc::clone(control),
            socket: LaneSocket::new(stream)?,
            backlog: VecDeque::new(),
            broken: None,
            awake_until: Instant::now(),
        })
    }

    /// Something happened: what follows it is usually near.
    pub(super) fn stir(&mut self) {
        self.awake_until = Instant::now() + self.shared.config.spin;
    }

    pub(super) fn send(&mut self, frame: &Frame) -> Result<()> {
        self.socket.send(frame)
    }

    /// Takes in what the peer has said, without acting on it.
    ///
    /// # Errors
    /// `PeerLost` at the end of the channel or when the lane is to end, `Integrity` for garbage.
    pub(super) fn listen(&mut self) -> Result<()> {
        if self.control.ended() {
            return Err(Error::new(
                ErrorKind::PeerLost,
                "lane",
                "the lane was ended on this side",
            ));
        }
        if self.broken.is_none()
            && let Err(error) = self.take_in()
        {
            self.broken = Some(error);
        }
        match &self.broken {
            Some(error) if self.backlog.is_empty() => Err(error.clone()),
            _ => Ok(()),
        }
    }

    fn take_in(&mut self) -> Result<()> {
        if self.socket.blocked() {
            self.socket.flush()?;
        }
        while self.backlog.len() < MAX_BACKLOG
            && let Some(frame) = self.socket.receive()?
        {
            self.backlog.push_back(frame);
            self.stir();
        }
        Ok(())
    }

    /// What the peer said next.
    pub(super) fn heard(&mut self) -> Option<Frame> {
        self.backlog.pop_front()
    }

    /// Lets UCX work; sleeps when there is nothing to do, as long as `until` at most, and in slices where
    /// somebody has flags to look at.
    pub(super) fn rest(&mut self, worker: Option<&Worker>, flags: bool, until: Option<Instant>) -> Result<()> {
        if worker.is_some_and(Worker::progress) {
            self.stir();
            return Ok(());
        }
        let now = Instant::now();
        if now < self.awake_until {
            // Whoever else wants this core gets it: the peer on the same host, or the caller.
            std::thread::yield_now();
            return Ok(());
        }
        if let Some(worker) = worker
            && !worker.arm()?
        {
            return Ok(());
        }
        let left = until.map(|until| until.saturating_duration_since(now));
        let slice = if flags {
            Some(left.unwrap_or(SLICE).min(SLICE))
        } else {
            left
        };
        self.sleep(worker, slice);
        Ok(())
    }

    fn sleep(&self, worker: Option<&Worker>, limit: Option<Duration>) {
        let mut wanted = PollFlags::empty();
        if self.socket.listens() && self.backlog.len() < MAX_BACKLOG {
            wanted |= PollFlags::IN;
        }
        if self.socket.blocked() {
            wanted |= PollFlags::OUT;
        }
        let (peer, wake) = (self.socket.fd(), self.control.wake().as_fd());
        let event = worker.map_or(wake, Worker::event_fd);
        let mut fds = [
            PollFd::new(&peer, wanted),
            PollFd::new(&wake, PollFlags::IN),
            PollFd::new(&event, PollFlags::IN),
        ];
        let limit = limit.map(|limit| Timespec {
            tv_sec: limit.as_secs().cast_signed(),
            tv_nsec: limit.subsec_nanos().into(),
        });
        if let Err(error) = poll(&mut fds, limit.as_ref())
            && error != Errno::INTR
        {
            // The loop around this must go on, at a pace that leaves the machine usable.
            std::thread::sleep(SLICE);
        }
        self.control.wake().drain();
    }

    /// Waits for the peer's next word.
    ///
    /// # Errors
    /// As [`listen`](Self::listen), and `PeerUnreachable` when `deadline` has passed.
    pub(super) fn next(&mut self, worker: Option<&Worker>, deadline: Instant) -> Result<Frame> {
        loop {
            if let Some(frame) = self.heard() {
                return Ok(frame);
            }
            self.listen()?;
            if self.backlog.is_empty() {
                in_time(deadline)?;
                self.rest(worker, false, Some(deadline))?;
            }
        }
    }

    /// Waits until something holds that UCX brings about.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub(super) fn until(&mut self, worker: &Worker, deadline: Instant, mut holds: impl FnMut() -> bool) -> Result<()> {
        while !holds() {
            self.listen()?;
            in_time(deadline)?;
            self.rest(Some(worker), false, Some(deadline))?;
        }
        Ok(())
    }
}

fn in_time(deadline: Instant) -> Result<()> {
    if Instant::now() < deadline {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::PeerUnreachable,
        "lane",
        "the lane was not ready in time",
    ))
}
