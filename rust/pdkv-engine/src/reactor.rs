//! The progress thread: one per engine. It accepts, reads control channels, runs the timers, and
//! sleeps when there is nothing to do. After traffic it polls for a moment before it sleeps, since
//! the next message of an exchange is usually on its way.

use std::collections::BTreeMap;
use std::io::ErrorKind as IoKind;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use pdkv_core::wire::FrameDecoder;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::PeerCredentials;

use crate::accept::{Welcome, welcome};
use crate::reader::{Reader, read};
use crate::seats::{Come, Seats};
use crate::shared::Shared;

pub(crate) const WAKE: Token = Token(0);
const LISTENER: Token = Token(1);
const LOCAL: Token = Token(2);
const FIRST: usize = 3;

/// Connections that haven't said yet what they are. For one more, the oldest is turned away: peers say
/// what they are at once, so idle ones keep nobody out.
const MAX_STRANGERS: usize = 256;
/// Pause after a poll that failed.
const POLL_AGAIN: Duration = Duration::from_millis(10);
/// How long a stranger may take to say what it is.
const PATIENCE: Duration = Duration::from_secs(5);
/// When to accept again after the system had no descriptor for a connection.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// Connections that are taken in at a listener before everything else has its turn again: whoever connects without end holds up nobody.
const ACCEPT_AT_ONCE: usize = 64;

enum Conn {
    Stranger {
        stream: TcpStream,
        decoder: FrameDecoder,
        until: Instant,
    },
    Peer(Arc<Reader>),
}

pub(crate) struct Reactor {
    shared: Arc<Shared>,
    poll: Poll,
    listener: Option<TcpListener>,
    local: Option<UnixListener>,
    seats: Arc<Mutex<Seats<UnixStream>>>,
    /// Somebody waits at the local socket: whoever has his answer wakes this thread for the next.
    local_waits: bool,
    /// Connections may wait at a listener without another event for them.
    accept_again: bool,
    /// More connections wait than had their turn.
    accept_more: bool,
    conns: BTreeMap<usize, Conn>,
    next: usize,
    buffer: Vec<u8>,
}

impl Reactor {
    pub(crate) fn new(
        shared: Arc<Shared>,
        poll: Poll,
        mut listener: Option<TcpListener>,
        local: Option<UnixListener>,
    ) -> Result<Self> {
        if let Some(listener) = &mut listener {
            poll.registry()
                .register(listener, LISTENER, Interest::READABLE)
                .map_err(start)?;
        }
        if let Some(local) = &local {
            use std::os::fd::AsRawFd;
            poll.registry()
                .register(&mut SourceFd(&local.as_raw_fd()), LOCAL, Interest::READABLE)
                .map_err(start)?;
        }
        Ok(Self {
            shared,
            poll,
            listener,
            local,
            seats: Arc::default(),
            local_waits: false,
            accept_again: false,
            accept_more: false,
            conns: BTreeMap::new(),
            next: FIRST,
            buffer: vec![0; 16 << 10],
        })
    }

    /// Runs until the engine is closed.
    pub(crate) fn run(mut self) {
        let mut events = Events::with_capacity(256);
        let spin = self.shared.config.spin;
        let mut busy_until = Instant::now();
        let mut sleep = self.shared.tick();
        while !self.shared.halted.load(Ordering::Acquire) {
            let spinning = Instant::now() < busy_until;
            let timeout = if spinning {
                Some(Duration::ZERO)
            } else {
                self.timeout(sleep)
            };
            match self.poll.poll(&mut events, timeout) {
                Ok(()) => {}
                Err(error) if error.kind() == IoKind::Interrupted => continue,
                Err(error) => {
                    // The timers must go on: without them nothing would ever end.
                    tracing::error!(%error, "the progress thread can't poll");
                    std::thread::sleep(POLL_AGAIN);
                    events.clear();
                }
            }
            if std::mem::take(&mut self.accept_again) | std::mem::take(&mut self.accept_more) {
                self.accept();
                self.accept_local();
            }
            if std::mem::take(&mut self.local_waits) {
                self.accept_local();
            }
            if spinning && events.is_empty() {
                // Whoever else wants this core gets it: the peer that was just woken, or the caller.
                std::thread::yield_now();
                continue;
            }
            let mut traffic = false;
            for event in &events {
                match event.token() {
                    WAKE => self.arrive(),
                    LISTENER => self.accept(),
                    LOCAL => self.accept_local(),
                    Token(id) => {
                        traffic = true;
                        self.serve(id, event.is_writable());
                    }
                }
            }
            self.send_strangers_away();
            sleep = self.shared.tick();
            if traffic {
                busy_until = Instant::now() + spin;
            }
        }
        // The port is free again before close() returns.
        self.local = None;
        self.listener = None;
        self.seats().dismiss();
        self.shared.stopped.set();
    }

    fn timeout(&self, sleep: Option<Duration>) -> Option<Duration> {
        let strangers = self.conns.values().any(|conn| matches!(conn, Conn::Stranger { .. }));
        let patience = strangers.then_some(Duration::from_millis(500));
        let again = self.accept_again.then_some(ACCEPT_AGAIN);
        let more = self.accept_more.then_some(Duration::ZERO);
        [sleep, patience, again, more].into_iter().flatten().min()
    }

    fn send_strangers_away(&mut self) {
        let now = Instant::now();
        self.conns
            .retain(|_, conn| !matches!(conn, Conn::Stranger { until, .. } if *until <= now));
    }

    fn insert(&mut self, conn: Conn) -> usize {
        let id = self.next;
        self.next += 1;
        self.conns.insert(id, conn);
        id
    }

    /// Takes over the connections that callers made.
    fn arrive(&mut self) {
        let arrivals = std::mem::take(&mut *self.shared.arrivals.lock().expect("no holder panics"));
        for reader in arrivals {
            let id = self.insert(Conn::Peer(reader));
            self.watch(id);
        }
    }

    /// Enters a peer's socket in the poll, which raises an event for whatever came in before.
    fn watch(&mut self, id: usize) {
        let Some(Conn::Peer(reader)) = self.conns.get(&id) else {
            return;
        };
        let entered = self
            .poll
            .registry()
            .try_clone()
            .and_then(|registry| reader.enter(registry, Token(id)));
        if let Err(error) = entered {
            let key = reader.key();
            self.conns.remove(&id);
            self.shared.peer_lost(key, &start(error));
        }
    }

    fn register(&self, stream: &TcpStream, id: usize) -> std::io::Result<()> {
        use std::os::fd::AsRawFd;
        let fd = stream.as_raw_fd();
        let mut source = SourceFd(&fd);
        self.poll
            .registry()
            .register(&mut source, Token(id), Interest::READABLE)
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPT_AT_ONCE {
            let Some(accepted) = self.listener.as_ref().map(TcpListener::accept) else {
                return;
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    self.accept_again |= error.kind() != IoKind::WouldBlock;
                    return;
                }
            };
            let strangers = self
                .conns
                .iter()
                .filter(|(_, conn)| matches!(conn, Conn::Stranger { .. }));
            let (count, oldest) =
                strangers.fold((0, None), |(count, oldest), (&id, _)| (count + 1, oldest.or(Some(id))));
            if count >= MAX_STRANGERS
                && let Some(oldest) = oldest
            {
                self.conns.remove(&oldest);
            }
            let _ = stream.set_nodelay(true);
            let id = self.next;
            if self.register(&stream, id).is_ok() {
                let until = Instant::now() + PATIENCE;
                self.insert(Conn::Stranger {
                    stream,
                    decoder: FrameDecoder::before_hello(),
                    until,
                });
                self.serve(id, false);
            }
        }
        self.accept_more = true;
    }

    fn seats(&self) -> MutexGuard<'_, Seats<UnixStream>> {
        self.seats.lock().expect("no holder panics")
    }

    fn accept_local(&mut self) {
        loop {
            let next = self.seats().next();
            let Some((who, stream)) = next else { break };
            self.answer(who, stream);
        }
        let mut turns = 0..ACCEPT_AT_ONCE;
        while let Some(listener) = &self.local {
            if self.seats().is_full() {
                // Whoever leaves from now on wakes this thread for those that wait outside, of whom there is no other event.
                self.local_waits = true;
                break;
            }
            if turns.next().is_none() {
                self.accept_more = true;
                break;
            }
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => {
                    self.accept_again |= error.kind() != IoKind::WouldBlock;
                    break;
                }
            };
            let who = match PeerCredentials::of(stream.as_fd()) {
                Ok(who) if who.is_ours_or_root() => who,
                other => {
                    tracing::debug!(?other, "the local socket is not for others");
                    continue;
                }
            };
            let come = self.seats().come(who, stream);
            match come {
                Come::Seated(stream) => self.answer(who, stream),
                Come::Waits => {}
                Come::Refused(stream) => crate::local::turn_away(&stream),
            }
        }
        let seats = self.seats();
        let waits = seats.is_full() || seats.any_waits();
        drop(seats);
        self.local_waits |= waits;
    }

    /// Answers somebody who has a seat.
    fn answer(&self, who: PeerCredentials, stream: UnixStream) {
        let seat = Seat {
            who,
            seats: Arc::clone(&self.seats),
            shared: Arc::clone(&self.shared),
        };
        // Without a thread it is closed, and whoever asked asks again.
        let _ = self.shared.movers.task(move || {
            if let Err(error) = crate::local::answer(&seat.shared, seat.who, stream) {
                tracing::debug!(%error, "local socket");
            }
            drop(seat);
        });
    }

    /// Reads what a connection has, until it has no more.
    fn serve(&mut self, id: usize, writable: bool) {
        let Some(conn) = self.conns.remove(&id) else { return };
        let (kept, known) = match conn {
            Conn::Stranger { stream, decoder, until } => (self.serve_stranger(stream, decoder, until), false),
            Conn::Peer(reader) => (self.serve_peer(reader, writable), true),
        };
        if let Some(conn) = kept {
            let made_known = !known && matches!(conn, Conn::Peer(_));
            self.conns.insert(id, conn);
            if made_known {
                self.watch(id);
            }
        }
    }

    fn serve_stranger(&mut self, stream: TcpStream, mut decoder: FrameDecoder, until: Instant) -> Option<Conn> {
        loop {
            match decoder.next() {
                Ok(Some(message)) => match welcome(&self.shared, stream, decoder, message) {
                    Ok(Welcome::Peer(reader)) => return Some(Conn::Peer(reader)),
                    Ok(Welcome::Stream) => return None,
                    Err(error) => {
                        tracing::debug!(%error, "a connection was turned away");
                        return None;
                    }
                },
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(%error, "a stranger doesn't speak pdkv");
                    return None;
                }
            }
            match read(&stream, &mut self.buffer) {
                Ok(0) => return Some(Conn::Stranger { stream, decoder, until }),
                Ok(count) => decoder.push(&self.buffer[..count]),
                Err(_) => return None,
            }
        }
    }

    fn serve_peer(&mut self, reader: Arc<Reader>, writable: bool) -> Option<Conn> {
        let key = reader.key();
        if writable {
            let mut state = self.shared.lock();
            let flushed = state.peers.get_mut(&key).map(|entry| entry.channel.flush());
            drop(state);
            if let Some(Err(error)) = flushed {
                self.shared.peer_lost(key, &error);
                return None;
            }
        }
        match reader.pump(&self.shared) {
            Ok(None | Some(true)) => Some(Conn::Peer(reader)),
            Ok(Some(false)) => None,
            Err(error) => {
                self.shared.peer_lost(key, &error);
                None
            }
        }
    }
}

/// One of the local-socket connections that are answered at once, given up on drop.
struct Seat {
    who: PeerCredentials,
    seats: Arc<Mutex<Seats<UnixStream>>>,
    shared: Arc<Shared>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let wanted = self.seats.lock().expect("no holder panics").leave(self.who);
        if wanted {
            let _ = self.shared.waker.wake();
        }
    }
}

fn start(error: std::io::Error) -> Error {
    Error::new(
        ErrorKind::Capacity,
        "start",
        "the progress thread can't watch its sockets",
    )
    .with_source(error)
}
