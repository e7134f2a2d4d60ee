//! Connecting to a peer: dial, handshake, find every way into the peer's memory, map what can be
//! mapped. All of it in the calling thread, before the caller can transfer anything, and under one deadline: what
//! isn't mapped by then is mapped in the background, or by whoever wants it first.

use std::io::Read;
use std::net::{TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pdkv_core::id::{Incarnation, PeerKey, SessionToken};
use pdkv_core::node::Role;
use pdkv_core::session::{Connecting, Established};
use pdkv_core::wire::{self, Advertise, FrameDecoder, Hello, MAX_FRAME, RegionAdvert, StreamPurpose};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::{Process, Stop};

use crate::channel::Channel;
use crate::config::TransportKind;
use crate::dial::{LocalDial, TcpDial, dial, pipe_dial, stream_dial};
use crate::door::LocalDoor;
use crate::engine::inproc_engine;
use crate::far_look::FarLook;
use crate::link::PeerLink;
use crate::look::Inquiry;
use crate::peer::Peer;
use crate::raw_fence::RawFence;
use crate::reader::Reader;
use crate::remote::Remote;
use crate::shared::{PeerEntry, Shared};
use crate::transport::gpu::GpuLink;
use crate::transport::onesided::OneSided;
use crate::transport::tcp::{Dial, TcpLink};
use crate::transport::ucx::{LANE_WAIT, UcxLink};
use crate::transport::{Link, Way};

/// What to look at when somebody hangs up on a hello, which shows as an end or as a reset.
const WHO_LISTENS: &str =
    "is it a pdkv engine that listens there? `engine.address` tells, and a bench producer is none";

/// How long one look at the socket takes at most.
const SLICE: Duration = Duration::from_millis(50);

/// Connects, or says why not before `timeout` is over.
pub(crate) fn connect(shared: &Arc<Shared>, address: &str, timeout: Duration) -> Result<Peer> {
    shared.check_open("connect")?;
    let deadline = Instant::now() + timeout.min(Duration::from_secs(3600));
    let stream = dial(address, &deadline)?;
    let (established, decoder) = shake_hands(shared, &stream, deadline).map_err(|e| e.with("address", address))?;
    if established.remote.incarnation == shared.incarnation {
        return Err(
            Error::new(ErrorKind::Config, "connect", "an engine can't connect to itself")
                .with_hint("copies within one engine need no transport"),
        );
    }
    let near = reach_host(shared, &established, &stream, deadline);
    // Where it was found: a name may lead elsewhere another time, and is slow to look up.
    let place = stream.peer_addr().map_err(broken)?.to_string();
    let (link, lanes) = find_ways(shared, [address, &place], &established, near);
    let link = Arc::new(link);
    let adverts = Advertise {
        regions: established.remote.regions.clone(),
        caches: established.remote.caches.clone(),
    };
    let unmapped = link.note(&adverts);
    stream.set_nonblocking(true).map_err(broken)?;
    let stream = Arc::new(mio::net::TcpStream::from_std(stream));
    let key = link.key;
    let reader = Arc::new(Reader::new(key, Arc::clone(&stream), decoder));
    shared.drive(|state, now| {
        // An engine that was closed meanwhile would never say goodbye.
        shared.check_open("connect")?;
        let entry = PeerEntry {
            channel: Channel::new(Arc::clone(&stream)),
            name: established.remote.name.clone(),
            token: None,
            link: Some(Arc::clone(&link)),
            reader: Arc::clone(&reader),
            writers: Vec::new(),
            same_host: false,
            features: established.features,
        };
        state.peers.insert(key, entry);
        state.node.peer_up(now, key, Role::Initiator, established.remote_peer());
        Ok::<_, Error>(())
    })?;
    shared.arrivals.lock().expect("no holder panics").push(reader);
    shared.waker.wake().map_err(broken)?;
    // The heartbeat runs by now: mapping much memory takes longer than a peer's patience.
    if !unmapped.is_empty() {
        link.map(&unmapped, &|| deadline.stopped());
        if deadline.stopped() {
            link.map_later(shared, unmapped);
        }
    }
    if let Some(lanes) = lanes {
        let left = deadline.saturating_duration_since(Instant::now());
        let others = link
            .ways
            .iter()
            .any(|way| way.kind != TransportKind::Ucx && way.link.is_ok());
        // What the hello named is known by now, unless it was withdrawn since.
        let known = |advert: &RegionAdvert| link.remote.region(advert.id, Duration::ZERO, |_| Ok(())).ok().flatten();
        let regions = established.remote.regions.iter().filter_map(known).collect();
        lanes.open(shared, if others { left.min(LANE_WAIT) } else { left }, regions);
    }
    link.check_alive()?;
    Ok(Peer {
        link,
        shared: Arc::clone(shared),
    })
}

fn shake_hands(shared: &Shared, mut stream: &TcpStream, deadline: Instant) -> Result<(Established, FrameDecoder)> {
    let left = || deadline.saturating_duration_since(Instant::now());
    let mut hello = hello_of(shared);
    getrandom::fill(&mut hello.attempt).map_err(no_random)?;
    let attempt = Connecting::new(shared.clock.now(), hello, left());
    // However slowly it is taken.
    stream.set_write_timeout(Some(SLICE)).map_err(broken)?;
    pdkv_device::send_exact(stream.as_fd(), &wire::encode(&attempt.hello())?, &deadline).map_err(
        |error| match error.kind() {
            ErrorKind::TransferCancelled => attempt.timed_out(),
            _ => Error::new(ErrorKind::PeerUnreachable, "connect", "the connection broke")
                .with_hint(WHO_LISTENS)
                .with_source(error),
        },
    )?;
    let mut decoder = FrameDecoder::before_hello();
    let mut buffer = vec![0; 64 << 10];
    loop {
        if let Some(message) = decoder.next()? {
            decoder.set_cap(MAX_FRAME);
            return Ok((attempt.answered(shared.clock.now(), message)?, decoder));
        }
        if left().is_zero() {
            return Err(attempt.timed_out());
        }
        stream
            .set_read_timeout(Some(left().max(Duration::from_millis(1))))
            .map_err(broken)?;
        match stream.read(&mut buffer) {
            Ok(0) => {
                let what = "the peer closed during the handshake";
                return Err(Error::new(ErrorKind::PeerUnreachable, "handshake", what).with_hint(WHO_LISTENS));
            }
            Ok(count) => decoder.push(&buffer[..count]),
            Err(error)
                if matches!(
                    error.kind(),
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                ) =>
            {
                return Err(attempt.timed_out());
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(broken(error)),
        }
    }
}

/// What this engine says of itself; the attempt is left empty.
pub(crate) fn hello_of(shared: &Shared) -> Hello {
    let (regions, caches) = shared.registry.adverts();
    let facts = pdkv_device::host_facts();
    Hello {
        min_version: pdkv_core::session::MIN_VERSION,
        max_version: pdkv_core::session::MAX_VERSION,
        features: pdkv_core::session::features::OURS,
        name: shared.name.clone(),
        incarnation: shared.incarnation,
        address: shared.address.clone().unwrap_or_default(),
        host: wire::HostFacts {
            pid: std::process::id(),
            boot_id: facts.boot_id,
            pid_namespace: facts.pid_namespace,
            local_socket: shared.local_name.clone().unwrap_or_default(),
            probe: Some(wire::Probe {
                address: shared.probe.as_ptr().expose_provenance() as u64,
                nonce: *shared.probe,
            }),
        },
        peer_timeout: shared.config.peer_timeout,
        heartbeat: shared.config.heartbeat,
        regions,
        caches,
        attempt: [0; 16],
    }
}

/// Tries every configured transport and keeps the reasons against those that don't work.
/// What takes an exchange with the peer is left for later: then the heartbeat runs. `place` is where the `address` led.
fn find_ways(
    shared: &Arc<Shared>,
    [address, place]: [&str; 2],
    established: &Established,
    near: Near,
) -> (PeerLink, Option<Arc<UcxLink>>) {
    let remote = &established.remote;
    // A process can't lend memory of a GPU to itself, so `cuda` needs to know too.
    let kinds = shared.config.kinds();
    let wanted = kinds.contains(&TransportKind::Inproc) || kinds.contains(&TransportKind::Cuda);
    let inproc = if wanted {
        inproc_engine(remote.incarnation)
    } else {
        None
    };
    let Near { door, process } = near;
    let key = shared.new_peer_key();
    let mut ways = Vec::new();
    let mut direct = Vec::new();
    let (mut gpu, mut lanes) = (None, None);
    for &kind in shared.config.kinds() {
        let link: Result<Arc<dyn Link>, String> = match kind {
            TransportKind::Cuda => GpuLink::new(shared, inproc.is_some(), &door).map(|link| {
                gpu = Some(Arc::clone(&link));
                link as Arc<dyn Link>
            }),
            TransportKind::Tcp => Ok(tcp_link(
                shared,
                key,
                place,
                established,
                door.as_ref().ok(),
                process.is_err(),
            )),
            TransportKind::Ucx => {
                let dial = stream_dial(shared, place, established, StreamPurpose::UcxLane);
                UcxLink::prepare(shared, established, key, dial).map(|link| {
                    lanes = Some(Arc::clone(&link));
                    link as Arc<dyn Link>
                })
            }
            _ => one_sided(shared, kind, inproc.is_some(), &door, &process).map(|link| {
                direct.push(Arc::clone(&link));
                link as Arc<dyn Link>
            }),
        };
        ways.push(Way { kind, link });
    }
    let link = PeerLink {
        key,
        address: address.to_owned(),
        remote: Remote::new(remote.name.clone(), remote.incarnation),
        ways,
        direct,
        gpu,
        fence: RawFence::new(inquiry(shared, place, established, door.as_ref().ok())),
        pipes: pipe_dial(shared, place, established),
        door: door.ok(),
        inproc,
        lost: AtomicBool::new(false),
        cause: Mutex::new(None),
    };
    (link, lanes)
}

/// How the peer is asked whether its memory is where it was.
fn inquiry(shared: &Shared, address: &str, established: &Established, door: Option<&LocalDoor>) -> Inquiry {
    door.cloned().map_or_else(
        || {
            let dial = TcpDial::new(shared, address, established, StreamPurpose::Data);
            Inquiry::Far(FarLook::new(Box::new(dial)))
        },
        Inquiry::Near,
    )
}

/// What the kernel grants of a peer on this host, or why it doesn't.
struct Near {
    door: Result<LocalDoor, String>,
    process: Result<Arc<Process>, String>,
}

/// Finds out what there is of the peer on this host, within the time that the caller has.
fn reach_host(shared: &Shared, established: &Established, stream: &TcpStream, deadline: Instant) -> Near {
    let door = local_door(shared, established, stream, deadline);
    let process = door.as_ref().map_err(Clone::clone);
    let process = process.and_then(|door| reach_process(established, door));
    Near { door, process }
}

/// Whether the other end of a connection has an address of this host: what a peer says of itself is no proof that it is here.
fn ends_here(stream: &TcpStream) -> bool {
    let Ok(mut address) = stream.peer_addr() else {
        return false;
    };
    address.set_port(0);
    let elsewhere = |error: std::io::Error| error.kind() == std::io::ErrorKind::AddrNotAvailable;
    !UdpSocket::bind(address).is_err_and(elsewhere)
}

/// The peer's local socket, when the kernel says that the peer is on this host.
fn local_door(
    shared: &Shared,
    established: &Established,
    stream: &TcpStream,
    deadline: Instant,
) -> Result<LocalDoor, String> {
    let (here, host) = (pdkv_device::host_facts().boot_id, &established.remote.host);
    if here.is_empty() || here != host.boot_id || !ends_here(stream) {
        return Err("the peer is on another host, or has a network of its own".to_owned());
    }
    if host.local_socket.is_empty() {
        return Err("the peer has no local socket".to_owned());
    }
    if shared.local_name.as_ref() == Some(&host.local_socket) {
        return Err("the peer names our own local socket as its own".to_owned());
    }
    let found = LocalDoor::find(&host.local_socket, established.token, &|| deadline.stopped());
    found.map_err(|error| error.message().to_owned())
}

/// Proves that the kernel lets us read that very process: names and ids fool in containers, so the proof is a nonce
/// read from where the peer says it keeps it. Which process it is, the kernel says, never the peer: it could name any that
/// has such bytes at such a place.
fn reach_process(established: &Established, door: &LocalDoor) -> Result<Arc<Process>, String> {
    let probe = established.remote.host.probe.ok_or("the peer offers no probe")?;
    let pid = door.pid();
    let read = Process::open(pid).and_then(|process| Ok((process.probe(probe.address, &probe.nonce)?, process)));
    match read {
        Ok((true, process)) => Ok(Arc::new(process)),
        Ok((false, _)) => Err(format!("process `{pid}` is not the peer")),
        Err(error) => Err(error.message().to_owned()),
    }
}

fn one_sided(
    shared: &Arc<Shared>,
    kind: TransportKind,
    same_process: bool,
    door: &Result<LocalDoor, String>,
    process: &Result<Arc<Process>, String>,
) -> Result<Arc<OneSided>, String> {
    let (detail, process) = match kind {
        TransportKind::Inproc if !same_process => return Err("the peer is another process".to_owned()),
        TransportKind::Inproc => ("same process".to_owned(), None),
        TransportKind::Shm => {
            door.as_ref().map_err(Clone::clone)?;
            ("shared mapping".to_owned(), process.clone().ok())
        }
        _ => {
            let process = process.clone()?;
            (
                format!("process_vm_readv/writev, process {}", process.pid()),
                Some(process),
            )
        }
    };
    Ok(Arc::new(OneSided::new(
        kind,
        detail,
        process,
        door.as_ref().ok().cloned(),
        Arc::clone(&shared.movers),
    )))
}

/// Streams to the peer: over its local socket where both ends share a host but neither memory nor
/// ptrace rights, else over TCP.
fn tcp_link(
    shared: &Arc<Shared>,
    key: PeerKey,
    address: &str,
    established: &Established,
    door: Option<&LocalDoor>,
    no_ptrace: bool,
) -> Arc<dyn Link> {
    let streams = shared.config.tcp_streams;
    let (family, dial): (_, Box<dyn Dial>) = if let Some(door) = door.filter(|_| no_ptrace) {
        ("unix-domain", Box::new(LocalDial::new(door, established)))
    } else {
        (
            "tcp",
            Box::new(TcpDial::new(shared, address, established, StreamPurpose::Data)),
        )
    };
    let (movers, stagings) = (Arc::clone(&shared.movers), Arc::clone(&shared.stagings));
    Arc::new(TcpLink::new(key, streams, family, dial, movers, stagings))
}

pub(crate) fn broken(error: std::io::Error) -> Error {
    Error::new(ErrorKind::PeerUnreachable, "connect", "the connection broke")
        .with_hint(WHO_LISTENS)
        .with_source(error)
}

pub(crate) fn no_random(error: getrandom::Error) -> Error {
    Error::new(
        ErrorKind::Internal,
        "start",
        format!("the system gives no random bytes: {error}"),
    )
}

/// Fresh random bytes as a session token.
pub(crate) fn fresh_token() -> Result<SessionToken> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(no_random)?;
    Ok(SessionToken::new(bytes))
}

/// Fresh random bytes as an incarnation.
pub(crate) fn fresh_incarnation() -> Result<Incarnation> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(no_random)?;
    Ok(Incarnation::new(bytes))
}
