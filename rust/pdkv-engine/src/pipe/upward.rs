//! What a receiver says to its sender: small frames that never wait, so that any thread may say them. How far it has
//! come is said at most every few milliseconds, by the progress thread when nobody else does.

use std::io::{ErrorKind as IoKind, Write};
use std::net::TcpStream;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use pdkv_core::pipe::ToSender;

/// Receipts are this far apart: a sender that waits for one is woken by each.
const APART: Duration = Duration::from_millis(5);
/// What may wait for a sender that doesn't listen. Each frame is the answer to one of its own, so an honest one is never
/// so far behind.
const MAX_PENDING: usize = 64 << 10;

#[derive(Default)]
pub(super) struct Upward {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    out: Vec<u8>,
    /// The last receipt: for how many items, and when.
    told: u64,
    at: Option<Duration>,
    owed: bool,
    /// The stream takes nothing any more; reading it tells why.
    dead: bool,
}

impl State {
    fn flush(&mut self, mut stream: &TcpStream) {
        let mut sent = 0;
        while sent < self.out.len() && !self.dead {
            match stream.write(&self.out[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == IoKind::WouldBlock => break,
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(_) => self.dead = true,
            }
        }
        self.out.drain(..sent);
    }

    fn say(&mut self, stream: &TcpStream, frame: &ToSender<'_>) {
        if self.out.len() > MAX_PENDING {
            self.dead = true;
        }
        if !self.dead {
            frame.encode(&mut self.out);
            self.flush(stream);
        }
    }

    fn receipt(&mut self, stream: &TcpStream, items: u64, now: Duration) {
        (self.told, self.at, self.owed) = (items, Some(now), false);
        self.say(stream, &ToSender::Received { items });
    }
}

impl Upward {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// Says something at once.
    pub(super) fn say(&self, stream: &TcpStream, frame: &ToSender<'_>) {
        self.lock().say(stream, frame);
    }

    /// Sends what the stream did not take before; whether something is still left.
    pub(super) fn flush(&self, stream: &TcpStream) -> bool {
        let mut state = self.lock();
        state.flush(stream);
        !state.out.is_empty() && !state.dead
    }

    /// The application has `items` and may not come back for more soon. When the receipt must wait, when
    /// [`tick`](Self::tick) is to be called for it.
    pub(super) fn receipt(&self, stream: &TcpStream, items: u64, now: Duration) -> Option<Duration> {
        let mut state = self.lock();
        match state.at {
            Some(at) if now < at + APART => {
                let first = !std::mem::replace(&mut state.owed, true);
                first.then_some(at + APART)
            }
            _ => {
                state.receipt(stream, items, now);
                None
            }
        }
    }

    /// Says what is owed by now; when to come again for what isn't due yet.
    pub(super) fn tick(&self, stream: &TcpStream, items: u64, now: Duration) -> Option<Duration> {
        let mut state = self.lock();
        let due = state.at.map_or(now, |at| at + APART);
        if !state.owed {
            return None;
        }
        if now < due {
            return Some(due);
        }
        state.receipt(stream, items, now);
        None
    }
}
