//! The receiving half of a control channel. The progress thread reads it when the system says that
//! there is something; a caller that waits for a transfer with the peer may read it for a moment
//! itself, because two threads less on the way are most of the latency of a small transfer.

use std::io::{ErrorKind as IoKind, Read};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use pdkv_core::id::PeerKey;
use pdkv_core::wire::{FrameDecoder, Message};
use pdkv_core::{Error, ErrorKind, Result};

use crate::shared::Shared;

/// Reads in one turn: somebody who sends without end gets its turns, and everybody else theirs.
const TURN: u32 = 4;

pub(crate) struct Reader {
    key: PeerKey,
    stream: Arc<TcpStream>,
    input: Mutex<Input>,
    watch: Mutex<Watch>,
}

struct Input {
    decoder: FrameDecoder,
    buffer: Vec<u8>,
}

/// How the progress thread's poll looks at the socket.
#[derive(Default)]
struct Watch {
    /// Where to enter the socket, once the progress thread has taken it over.
    place: Option<(Registry, Token)>,
    entered: bool,
    writable: bool,
}

impl Watch {
    /// Makes the poll look at the socket as it should now. Raises an event for what is there already.
    fn apply(&mut self, stream: &TcpStream, entered: bool) -> std::io::Result<()> {
        let Some((registry, token)) = &self.place else {
            return Ok(());
        };
        let fd = stream.as_raw_fd();
        let mut source = SourceFd(&fd);
        let interest = if self.writable {
            Interest::READABLE | Interest::WRITABLE
        } else {
            Interest::READABLE
        };
        let was = std::mem::replace(&mut self.entered, entered);
        match (was, entered) {
            (false, false) => Ok(()),
            (true, false) => registry.deregister(&mut source),
            (false, true) => registry.register(&mut source, *token, interest),
            (true, true) => registry.reregister(&mut source, *token, interest),
        }
    }
}

impl Reader {
    pub(crate) fn new(key: PeerKey, stream: Arc<TcpStream>, decoder: FrameDecoder) -> Self {
        let input = Input {
            decoder,
            buffer: vec![0; 64 << 10],
        };
        Self {
            key,
            stream,
            input: Mutex::new(input),
            watch: Mutex::default(),
        }
    }

    pub(crate) fn key(&self) -> PeerKey {
        self.key
    }

    fn watch(&self) -> MutexGuard<'_, Watch> {
        self.watch.lock().expect("no holder panics")
    }

    /// The progress thread takes the socket over; it may have watched it as a stranger's before.
    pub(crate) fn enter(&self, registry: Registry, token: Token) -> std::io::Result<()> {
        let mut watch = self.watch();
        // Not being there yet is the usual case.
        let _ = registry.deregister(&mut SourceFd(&self.stream.as_raw_fd()));
        watch.place = Some((registry, token));
        watch.apply(&self.stream, true)
    }

    /// Output is waiting for the socket: the progress thread wants to know when it takes more.
    pub(crate) fn watch_writable(&self) {
        let mut watch = self.watch();
        let entered = watch.entered;
        if !std::mem::replace(&mut watch.writable, true) && entered {
            // A socket that can't be watched is broken, and reading it will say so.
            let _ = watch.apply(&self.stream, true);
        }
    }

    /// Reads and hands over until nothing is there. `Ok(None)`: a caller is reading, and whatever it
    /// leaves raises a new event. `Ok(Some(false))`: the peer was closed from our side meanwhile.
    pub(crate) fn pump(&self, shared: &Arc<Shared>) -> Result<Option<bool>> {
        let Ok(mut input) = self.input.try_lock() else {
            return Ok(None);
        };
        self.pump_into(shared, &mut input).map(Some)
    }

    /// Reads in the calling thread until `done` says so or `limit` has passed. The progress thread
    /// sleeps meanwhile.
    pub(crate) fn pump_until(&self, shared: &Arc<Shared>, limit: Duration, done: impl Fn() -> bool) {
        let Ok(mut input) = self.input.try_lock() else { return };
        let started = Instant::now();
        let _ = self.watch().apply(&self.stream, false);
        let outcome = loop {
            match self.pump_into(shared, &mut input) {
                // Between two looks the core is anybody's, the peer's above all.
                Ok(true) if !done() && started.elapsed() < limit => std::thread::yield_now(),
                other => break other,
            }
        };
        drop(input);
        // Entered again, also when it broke: the progress thread then meets the end by itself.
        let _ = self.watch().apply(&self.stream, true);
        if let Err(error) = outcome {
            shared.peer_lost(self.key, &error);
        }
    }

    fn pump_into(&self, shared: &Arc<Shared>, input: &mut Input) -> Result<bool> {
        for turn in 0.. {
            while let Some(message) = input.decoder.next()? {
                if !self.hand_over(shared, message)? {
                    return Ok(false);
                }
            }
            if turn == TURN {
                break;
            }
            match read(&self.stream, &mut input.buffer)? {
                0 => return Ok(true),
                count => input.decoder.push(&input.buffer[..count]),
            }
        }
        // There may be more; looked at anew, the socket raises an event for it.
        let mut watch = self.watch();
        let entered = watch.entered;
        let _ = watch.apply(&self.stream, entered);
        Ok(true)
    }

    fn hand_over(&self, shared: &Arc<Shared>, message: Message) -> Result<bool> {
        match message {
            Message::Claim(claim) if shared.registry.may_move() => crate::fence::claim(shared, self.key, *claim),
            Message::Done(done) if shared.registry.may_move() && crate::fence::is_slow(shared, self.key, &done) => {
                crate::fence::done(shared, self.key, done);
                Ok(true)
            }
            message => self.tell(shared, message),
        }
    }

    fn tell(&self, shared: &Arc<Shared>, message: Message) -> Result<bool> {
        shared.drive(|state, now| {
            let Some(entry) = state.peers.get(&self.key) else {
                return Ok(false);
            };
            // Here, because the adverts that came before it are known only now.
            if let (Message::Pong(pong), Some(link)) = (&message, &entry.link) {
                link.remote.answered(pong.sequence);
            }
            state.node.handle(now, self.key, message).map(|()| true)
        })
    }
}

/// Reads once. `Ok(0)`: nothing there now. The end of the stream is an error.
pub(crate) fn read(mut stream: &TcpStream, buffer: &mut [u8]) -> Result<usize> {
    loop {
        match stream.read(buffer) {
            Ok(0) => {
                return Err(Error::new(
                    ErrorKind::PeerLost,
                    "control channel",
                    "the peer closed the connection",
                ));
            }
            Ok(count) => return Ok(count),
            Err(error) if error.kind() == IoKind::WouldBlock => return Ok(0),
            Err(error) if error.kind() == IoKind::Interrupted => {}
            Err(error) => {
                let what = "the connection to the peer broke";
                return Err(Error::new(ErrorKind::PeerLost, "control channel", what).with_source(error));
            }
        }
    }
}
