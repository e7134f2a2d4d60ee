//! Opening streams to an address: the connection that becomes a control channel, and those that join a session by its
//! token and say what they are for.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use pdkv_core::session::{Established, features};
use pdkv_core::wire::{self, Message, StreamHello, StreamPurpose};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Stop;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_error;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

use crate::config::resolve;
use crate::connect::broken;
use crate::door::LocalDoor;
use crate::shared::Shared;
use crate::transport::tcp::{Dial, Socket};

/// How long one look at a connection that is being made takes at most.
const CONNECTING: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};

/// Dials, until told to stop.
///
/// # Errors
/// `PeerUnreachable`, `Capacity` for want of a descriptor, `Config` for an address that is none.
pub(crate) fn dial(address: &str, until: &dyn Stop) -> Result<TcpStream> {
    let target = resolve(address, "connect")?;
    let stream = connect_until(&target, until).map_err(|errno| no_stream(address, errno.into()))?;
    stream.set_nodelay(true).map_err(broken)?;
    Ok(stream)
}

fn connect_until(target: &SocketAddr, until: &dyn Stop) -> rustix::io::Result<TcpStream> {
    let family = if target.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match connect(&socket, target) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(errno) => return Err(errno),
    }
    loop {
        match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&CONNECTING)) {
            Ok(0) | Err(Errno::INTR) if until.stopped() => return Err(Errno::TIMEDOUT),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => break,
            Err(errno) => return Err(errno),
        }
    }
    socket_error(&socket)??;
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket.into())
}

/// Why a connection was not made: for want of a descriptor here, or because of the other end.
fn no_stream(address: &str, error: std::io::Error) -> Error {
    let poor = [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
    if error.raw_os_error().is_some_and(|code| poor.contains(&code)) {
        let text = format!("no descriptor is left to connect to `{address}`");
        return Error::new(ErrorKind::Capacity, "connect", text)
            .with_hint("raise the limit of open files (`ulimit -n`)")
            .with_source(error);
    }
    let text = format!("nobody answers at `{address}`");
    Error::new(ErrorKind::PeerUnreachable, "connect", text)
        .with_hint("is the engine running, and does it listen there? `engine.address` tells")
        .with_source(error)
}

/// Whether nothing came for as long as a socket waits.
fn is_silence(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
}

/// How to open a stream of the session that is not for data.
pub(crate) type StreamDial = Arc<dyn Fn() -> Result<TcpStream> + Send + Sync>;

pub(crate) fn stream_dial(
    shared: &Shared,
    address: &str,
    established: &Established,
    purpose: StreamPurpose,
) -> StreamDial {
    let dial = TcpDial::new(shared, address, established, purpose);
    Arc::new(move || dial.stream(&NEVER))
}

/// How to open a pipe; `None` when the peer wouldn't know what the stream is for.
pub(crate) fn pipe_dial(shared: &Shared, address: &str, established: &Established) -> Option<StreamDial> {
    let known = established.features & features::PIPE != 0;
    known.then(|| stream_dial(shared, address, established, StreamPurpose::Pipe))
}

pub(crate) struct TcpDial {
    address: String,
    hello: StreamHello,
}

/// What the owner answers to a stream's hello once it will serve it.
pub(crate) const STREAM_READY: u8 = 0xA5;
/// The same when it has as many of the peer's as it takes.
pub(crate) const STREAM_FULL: u8 = 0x5A;
/// How long one look at an open stream takes at most.
const SLICE: Duration = Duration::from_millis(50);
/// For streams that are opened for nobody who could give up.
static NEVER: AtomicBool = AtomicBool::new(false);
/// Time to open one more data stream.
const STREAM_TIMEOUT: Duration = Duration::from_secs(5);

impl TcpDial {
    pub(crate) fn new(shared: &Shared, address: &str, established: &Established, purpose: StreamPurpose) -> Self {
        Self {
            address: address.to_owned(),
            hello: StreamHello {
                token: established.token,
                incarnation: shared.incarnation,
                index: 0,
                purpose,
            },
        }
    }

    /// A stream that the owner has taken on, unless told to stop before.
    fn stream(&self, stop: &dyn Stop) -> Result<TcpStream> {
        let cancelled = || {
            let text = "stopped before the stream was open";
            Error::new(ErrorKind::TransferCancelled, "data stream", text)
        };
        let deadline = Instant::now() + STREAM_TIMEOUT;
        let stream = dial(&self.address, &Until { deadline, stop })
            .map_err(|error| if stop.stopped() { cancelled() } else { error })?;
        (&stream)
            .write_all(&wire::encode(&Message::StreamHello(self.hello))?)
            .map_err(broken)?;
        let mut ready = [0];
        stream.set_read_timeout(Some(SLICE)).map_err(broken)?;
        let until = Instant::now() + STREAM_TIMEOUT;
        loop {
            match (&stream).read_exact(&mut ready) {
                Ok(()) => break,
                Err(error) if !is_silence(&error) || until.stopped() => return Err(broken(error)),
                Err(_) if stop.stopped() => return Err(cancelled()),
                Err(_) => {}
            }
        }
        stream.set_read_timeout(Some(STREAM_TIMEOUT)).map_err(broken)?;
        judge(ready[0])?;
        Ok(stream)
    }
}

/// What the owner's answer to a new stream means.
fn judge(answer: u8) -> Result<()> {
    let (kind, text) = match answer {
        STREAM_READY => return Ok(()),
        STREAM_FULL => (ErrorKind::Capacity, "the peer takes no more streams from here for now"),
        _ => (
            ErrorKind::Handshake,
            "the peer answered the stream's hello with garbage",
        ),
    };
    Err(Error::new(kind, "data stream", text))
}

impl Dial for TcpDial {
    fn open(&self, stop: &dyn Stop) -> Result<Socket> {
        Socket::new(OwnedFd::from(self.stream(stop)?))
    }
}

/// How to open data streams over the peer's local socket.
pub(crate) struct LocalDial {
    door: LocalDoor,
    /// The peer says whether it takes a stream on.
    answered: bool,
}

impl LocalDial {
    pub(crate) fn new(door: &LocalDoor, established: &Established) -> Self {
        Self {
            door: door.clone(),
            answered: established.features & features::STREAM_ANSWERS != 0,
        }
    }
}

/// Ends a wait for the peer.
struct Until<'a> {
    deadline: Instant,
    stop: &'a dyn Stop,
}

impl Stop for Until<'_> {
    fn stopped(&self) -> bool {
        self.stop.stopped() || Instant::now() >= self.deadline
    }
}

impl Dial for LocalDial {
    fn open(&self, stop: &dyn Stop) -> Result<Socket> {
        let socket = Socket::new(self.door.stream(&|| stop.stopped())?)?;
        if !self.answered {
            return Ok(socket);
        }
        let deadline = Instant::now() + STREAM_TIMEOUT;
        let mut answer = [0];
        let until = Until { deadline, stop };
        pdkv_device::recv_exact(socket.fd(), &mut answer, &until).map_err(|error| {
            if stop.stopped() {
                return error;
            }
            let text = "the peer does not say whether it takes a stream on";
            Error::new(ErrorKind::PeerUnreachable, "data stream", text).with_source(error)
        })?;
        judge(answer[0])?;
        Ok(socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pdkv_core::id::{Incarnation, SessionToken};
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_peer_that_takes_no_more_streams_is_not_one_that_talks_nonsense() {
        assert!(judge(STREAM_READY).is_ok());
        assert_eq!(judge(STREAM_FULL).unwrap_err().kind(), ErrorKind::Capacity);
        assert_eq!(judge(0).unwrap_err().kind(), ErrorKind::Handshake);
    }

    #[test]
    fn a_lack_of_descriptors_is_not_the_peers_silence() {
        let error = |errno: Errno| no_stream("127.0.0.1:1", errno.into()).kind();
        assert_eq!(error(Errno::MFILE), ErrorKind::Capacity);
        assert_eq!(error(Errno::CONNREFUSED), ErrorKind::PeerUnreachable);
    }

    /// A listener that answers nobody any more, and those that have kept it from that.
    fn deaf() -> (OwnedFd, Vec<OwnedFd>, SocketAddr) {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let socket = |flags| socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
        let listener = socket(SocketFlags::CLOEXEC);
        rustix::net::bind(&listener, &any).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let address = rustix::net::getsockname(&listener).unwrap().try_into().unwrap();
        let crowd = (0..8).map(|_| {
            let one = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
            let _ = connect(&one, &address);
            one
        });
        let crowd = crowd.collect();
        (listener, crowd, address)
    }

    /// From the third time on that somebody asks. What is not looked at in between is asked once, when it is over.
    #[derive(Default)]
    struct Stopped(AtomicUsize);

    impl Stop for Stopped {
        fn stopped(&self) -> bool {
            self.0.fetch_add(1, Ordering::Relaxed) >= 2
        }
    }

    #[test]
    fn who_wants_no_stream_any_more_does_not_wait_for_a_peer_that_answers_nothing() {
        let (_listener, _crowd, address) = deaf();
        let dial = TcpDial {
            address: address.to_string(),
            hello: StreamHello {
                token: SessionToken::new([1; 16]),
                incarnation: Incarnation::new([2; 16]),
                index: 0,
                purpose: StreamPurpose::Data,
            },
        };
        let stop = Stopped::default();
        let error = dial.stream(&stop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TransferCancelled);
        let error = super::dial(&dial.address, &Instant::now()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerUnreachable);
    }
}
