//! Connecting to a peer: dial, handshake, find every way into the peer's memory, map what can be
//! mapped. All of it in the calling thread and before the caller can transfer anything; dial and
//! handshake under one deadline, each step of the mapping under its own.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pdkv_core::id::{Incarnation, PeerKey, SessionToken};
use pdkv_core::node::Role;
use pdkv_core::session::{Connecting, Established};
use pdkv_core::wire::{self, Advertise, FrameDecoder, Hello, MAX_FRAME, RegionAdvert, StreamPurpose};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Process;

use crate::channel::Channel;
use crate::config::TransportKind;
use crate::dial::{TcpDial, dial, pipe_dial, stream_dial};
use crate::engine::inproc_engine;
use crate::link::PeerLink;
use crate::local::LocalDoor;
use crate::peer::Peer;
use crate::reader::Reader;
use crate::remote::Remote;
use crate::shared::{PeerEntry, Shared};
use crate::transport::gpu::GpuLink;
use crate::transport::onesided::OneSided;
use crate::transport::tcp::{Dial, Socket, TcpLink};
use crate::transport::ucx::{LANE_WAIT, UcxLink};
use crate::transport::{Link, Way};

/// What to look at when somebody hangs up on a hello, which shows as an end or as a reset.
const WHO_LISTENS: &str =
    "is it a pdkv engine that listens there? `engine.address` tells, and a bench producer is none";

/// Connects, or says why not before `timeout` is over.
pub(crate) fn connect(shared: &Arc<Shared>, address: &str, timeout: Duration) -> Result<Peer> {
    shared.check_open("connect")?;
    let deadline = Instant::now() + timeout.min(Duration::from_secs(3600));
    let stream = dial(address, deadline)?;
    let (established, decoder) = shake_hands(shared, &stream, deadline).map_err(|e| e.with("address", address))?;
    if established.remote.incarnation == shared.incarnation {
        return Err(
            Error::new(ErrorKind::Config, "connect", "an engine can't connect to itself")
                .with_hint("copies within one engine need no transport"),
        );
    }
    let (link, lanes) = find_ways(shared, address, &established);
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
        };
        state.peers.insert(key, entry);
        state.node.peer_up(now, key, Role::Initiator, established.remote_peer());
        Ok::<_, Error>(())
    })?;
    shared.arrivals.lock().expect("no holder panics").push(reader);
    shared.waker.wake().map_err(broken)?;
    // The heartbeat runs by now: mapping much memory takes longer than a peer's patience.
    if !unmapped.is_empty() {
        link.map(&unmapped);
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
    stream
        .set_write_timeout(Some(left().max(Duration::from_millis(1))))
        .map_err(broken)?;
    stream.write_all(&wire::encode(&attempt.hello())?).map_err(broken)?;
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
/// What takes an exchange with the peer is left for later: then the heartbeat runs.
fn find_ways(shared: &Arc<Shared>, address: &str, established: &Established) -> (PeerLink, Option<Arc<UcxLink>>) {
    let remote = &established.remote;
    // A process can't lend memory of a GPU to itself, so `cuda` needs to know too.
    let kinds = shared.config.kinds();
    let wanted = kinds.contains(&TransportKind::Inproc) || kinds.contains(&TransportKind::Cuda);
    let inproc = if wanted {
        inproc_engine(remote.incarnation)
    } else {
        None
    };
    let door = local_door(established);
    let process = reach_process(established, door.as_ref());
    let key = shared.new_peer_key();
    let mut ways = Vec::new();
    let mut direct = Vec::new();
    let (mut gpu, mut lanes) = (None, None);
    for &kind in shared.config.kinds() {
        let link: Result<Arc<dyn Link>, String> = match kind {
            TransportKind::Cuda => GpuLink::new(shared, inproc.is_some(), door.as_ref()).map(|link| {
                gpu = Some(Arc::clone(&link));
                link as Arc<dyn Link>
            }),
            TransportKind::Tcp => Ok(tcp_link(
                shared,
                key,
                address,
                established,
                door.as_ref(),
                process.is_err(),
            )),
            TransportKind::Ucx => {
                let dial = stream_dial(shared, address, established, StreamPurpose::UcxLane);
                UcxLink::prepare(shared, established, key, dial).map(|link| {
                    lanes = Some(Arc::clone(&link));
                    link as Arc<dyn Link>
                })
            }
            _ => one_sided(shared, kind, inproc.is_some(), door.as_ref(), &process).map(|link| {
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
        pipes: pipe_dial(shared, address, established),
        door,
        inproc,
        lost: AtomicBool::new(false),
        cause: Mutex::new(None),
    };
    (link, lanes)
}

/// Whether both ends were booted together; only a reason to try, never a proof.
fn same_host(established: &Established) -> bool {
    let here = pdkv_device::host_facts().boot_id;
    !here.is_empty() && here == established.remote.host.boot_id
}

/// The peer's local socket, when it is there and the kernel says that the peer is on this host.
fn local_door(established: &Established) -> Option<LocalDoor> {
    let name = &established.remote.host.local_socket;
    let same_boot = same_host(established);
    let door = LocalDoor {
        name: name.clone(),
        token: established.token,
    };
    (same_boot && !name.is_empty() && door.peer_pid().is_some()).then_some(door)
}

/// Proves that the kernel lets us read that very process: names and ids fool in containers, so the
/// proof is a nonce read from where the peer says it keeps it.
fn reach_process(established: &Established, door: Option<&LocalDoor>) -> Result<Arc<Process>, String> {
    let host = &established.remote.host;
    if !same_host(established) {
        return Err("the peer is on another host".to_owned());
    }
    let probe = host.probe.ok_or("the peer offers no probe")?;
    let candidates = [door.and_then(LocalDoor::peer_pid), Some(host.pid)];
    let mut reason = "the peer's process can't be found".to_owned();
    for pid in candidates.into_iter().flatten() {
        let read = Process::open(pid).and_then(|process| Ok((process.probe(probe.address, &probe.nonce)?, process)));
        match read {
            Ok((true, process)) => return Ok(Arc::new(process)),
            Ok((false, _)) => reason = format!("process `{pid}` is not the peer (another PID namespace?)"),
            Err(error) => error.message().clone_into(&mut reason),
        }
    }
    Err(reason)
}

fn one_sided(
    shared: &Arc<Shared>,
    kind: TransportKind,
    same_process: bool,
    door: Option<&LocalDoor>,
    process: &Result<Arc<Process>, String>,
) -> Result<Arc<OneSided>, String> {
    let (detail, process) = match kind {
        TransportKind::Inproc if !same_process => return Err("the peer is another process".to_owned()),
        TransportKind::Inproc => ("same process".to_owned(), None),
        TransportKind::Shm if door.is_none() => return Err("the peer's local socket can't be reached".to_owned()),
        TransportKind::Shm => ("shared mapping".to_owned(), process.clone().ok()),
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
        ("unix-domain", Box::new(door.clone()))
    } else {
        (
            "tcp",
            Box::new(TcpDial::new(shared, address, established, StreamPurpose::Data)),
        )
    };
    let (movers, stagings) = (Arc::clone(&shared.movers), Arc::clone(&shared.stagings));
    Arc::new(TcpLink::new(key, streams, family, dial, movers, stagings))
}

impl Dial for LocalDoor {
    fn open(&self) -> Result<Socket> {
        Socket::new(self.stream()?)
    }
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
