//! Local sockets of neighbours that let nobody in, say nothing, fail once, or belong to somebody else; and of ours, when many
//! come at once or somebody takes his time.

mod common;

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use common::child::{Child, is_child, obey};
use common::fake::{Wire, door, hello, hello_from_here, owner};
use common::{Memory, WAIT, allocate, engine, whole};
use pdkv_core::id::{RegionId, SessionToken};
use pdkv_core::session;
use pdkv_core::wire::{Hello, HelloAck, HostFacts, Message, RegionAdvert, SharedExtent};
use pdkv_core::{ErrorKind, Result};
use pdkv_device::{HostRegion, HugePages};
use pdkv_engine::{Engine, Peer, RawOptions, Region, Transfer, TransportKind};

const LEN: u64 = 4096;
/// What nothing here takes, however busy the machine.
const SOON: Duration = Duration::from_millis(300);
const GUARD: Duration = Duration::from_secs(120);
const MAGIC: [u8; 4] = *b"PKDL";
/// The end of an answer, and what is said to those that are turned away.
const END: u8 = 0xE0;
const FULL: u8 = 0x5A;

/// A hello of a neighbour with one region of shared memory, number 5, and a local socket of this name.
fn neighbour(local_socket: String) -> Hello {
    let region = RegionAdvert {
        id: RegionId(5),
        len: LEN,
        base_address: 4096,
        shared: Some(SharedExtent { offset: 0, len: LEN }),
        raw_access: true,
        name: String::new(),
        device: None,
    };
    let from_here = hello_from_here();
    Hello {
        host: HostFacts {
            local_socket,
            ..from_here.host.clone()
        },
        regions: vec![region],
        ..from_here
    }
}

/// Somebody who reads region 5 of a neighbour that the test plays.
struct Reader {
    engine: Engine,
    here: Region,
    peer: Peer,
    owner: std::thread::JoinHandle<()>,
}

impl Reader {
    fn of(name: String, kind: TransportKind, timeout: Duration) -> Self {
        let (address, owner) = owner(neighbour(name), |mut wire| while wire.receive().is_some() {});
        let engine = engine("reader", &[kind]);
        let here = engine.register(allocate(Memory::Private, LEN), None, true).unwrap();
        let (told, connected) = mpsc::channel();
        let connecting = engine.clone();
        std::thread::spawn(move || told.send(connecting.connect(&address, timeout)));
        let peer = connected.recv_timeout(GUARD).expect("connect() returns").unwrap();
        Self {
            engine,
            here,
            peer,
            owner,
        }
    }

    fn read(&self, timeout: Duration) -> Result<Transfer> {
        let (near, far) = whole(self.here.id(), RegionId(5), LEN);
        let options = RawOptions {
            timeout,
            ..RawOptions::default()
        };
        self.peer.read(&near, &far, None, &options)
    }

    /// Reads until it goes well, which it does at last.
    fn read_at_last(&self) {
        let end = std::time::Instant::now() + GUARD;
        while let Err(error) = self.read(GUARD).and_then(|transfer| transfer.wait(WAIT)) {
            assert!(std::time::Instant::now() < end, "{error}");
            std::thread::sleep(Duration::from_millis(50));
        }
        let mut got = [0; LEN as usize];
        self.here.memory().read_at(0, &mut got).unwrap();
        assert_eq!(got, [7; LEN as usize]);
    }

    fn close(self) {
        self.engine.close();
        self.owner.join().unwrap();
    }
}

/// A door in whose queue there is room for one: who looks whether somebody is there, and never is let in.
fn full_door() -> (std::os::fd::OwnedFd, String) {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    let (listener, name) = door();
    drop(listener);
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let door = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&door, &address).unwrap();
    listen(&door, 0).unwrap();
    (door, name)
}

#[test]
fn a_neighbour_that_lets_nobody_in_holds_no_caller() {
    let (_door, name) = full_door();
    let reader = Reader::of(name, TransportKind::Shm, Duration::from_secs(10));
    let ended = reader.read(Duration::from_millis(300)).and_then(|transfer| {
        let ended = transfer.wait(WAIT);
        assert!(transfer.wait_quiesced(WAIT));
        ended
    });
    assert!(ended.is_err());
    reader.close();
}

#[test]
fn a_stream_that_nobody_lets_in_holds_no_transfer_past_its_deadline() {
    let (_door, name) = full_door();
    let reader = Reader::of(name, TransportKind::Tcp, GUARD);
    let transfer = reader.read(Duration::from_millis(300)).unwrap();
    assert!(transfer.path().detail.contains("unix-domain"), "{:?}", transfer.path());
    assert_eq!(transfer.wait(WAIT).unwrap_err().kind(), ErrorKind::TransferTimeout);
    assert!(transfer.wait_quiesced(WAIT));
    reader.close();
}

/// Gives what region 5 lies in, and the end of the answer.
fn give(stream: &UnixStream) {
    let memory = HostRegion::allocate(LEN, HugePages::Never).unwrap();
    memory.fill(0, LEN, 7).unwrap();
    let mut entry = [0; 32];
    entry[0] = 5;
    entry[16..24].copy_from_slice(&LEN.to_le_bytes());
    let never = AtomicBool::new(false);
    let fd = memory.shared().unwrap().fd;
    let _ = pdkv_device::send_fds(stream.as_fd(), &[fd], &entry, &never);
    let _ = pdkv_device::send_exact(stream.as_fd(), &[0xE0], &never);
}

/// Hands each question for region 5 to `answer`; others only look who is there.
fn answering(listener: UnixListener, mut answer: impl FnMut(UnixStream) + Send + 'static) {
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            if stream.read_exact(&mut [0; 24 + 4 + 8]).is_ok() {
                answer(stream);
            }
        }
    });
}

#[test]
fn what_a_silent_neighbour_has_not_handed_out_in_time_is_mapped_behind_the_callers_back() {
    let (listener, name) = door();
    let (asks, asked) = mpsc::channel();
    answering(listener, move |stream| asks.send(stream).unwrap());
    let reader = Reader::of(name, TransportKind::Shm, Duration::from_secs(10));
    let first = asked.recv_timeout(GUARD).unwrap();
    // It was let go of when the time was over, and the question is put again without anybody who waits.
    assert_eq!((&first).read(&mut [0]).unwrap(), 0);
    // It may have had its time before the question came, which is put again by who asks then.
    let end = std::time::Instant::now() + GUARD;
    let second = loop {
        if let Ok(second) = asked.recv_timeout(Duration::from_secs(5)) {
            break second;
        }
        assert!(std::time::Instant::now() < end, "the question is put again");
        let _ = reader.read(SOON);
    };
    give(&second);
    reader.read_at_last();
    reader.close();
}

#[test]
fn a_door_that_fails_once_costs_a_while_and_not_the_way() {
    let (listener, name) = door();
    let broken = Arc::new(AtomicBool::new(true));
    let state = Arc::clone(&broken);
    answering(listener, move |stream| {
        if !state.load(Ordering::Acquire) {
            give(&stream);
        }
    });
    let reader = Reader::of(name, TransportKind::Shm, GUARD);
    // Meanwhile nobody takes this way.
    let refused = reader.read(GUARD).map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    broken.store(false, Ordering::Release);
    reader.read_at_last();
    reader.close();
}

#[test]
fn who_says_that_he_is_this_process_is_not_believed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let owner = std::thread::spawn(move || {
        let mut wire = Wire::new(listener.accept().unwrap().0);
        let Some(Message::Hello(theirs)) = wire.receive() else {
            panic!("no hello came")
        };
        // Its own boot, process, probe and local socket, as if they were ours.
        let answer = Hello {
            host: theirs.host.clone(),
            ..hello()
        };
        let (ack, _) = session::accept(&answer, SessionToken::new([3; 16]), *theirs).unwrap();
        wire.send(&ack);
        while wire.receive().is_some() {}
    });
    let reader = engine("reader", &[TransportKind::Shm, TransportKind::Cma, TransportKind::Tcp]);
    let peer = reader.connect(&address, GUARD).unwrap();
    for link in peer.links() {
        assert_eq!(link.usable, link.transport == TransportKind::Tcp, "{}", link.detail);
    }
    reader.close();
    owner.join().unwrap();
}

#[test]
fn a_process_that_only_the_peer_names_is_not_reached_into() {
    // Bytes at a place of this process, as anybody could know them of a program without random addresses.
    static KNOWN: [u8; 32] = [0x5A; 32];
    let probe = pdkv_core::wire::Probe {
        address: KNOWN.as_ptr() as u64,
        nonce: KNOWN,
    };
    let from_here = hello_from_here();
    let answer = Hello {
        host: HostFacts {
            pid: std::process::id(),
            probe: Some(probe),
            ..from_here.host.clone()
        },
        ..from_here
    };
    let (address, owner) = owner(answer, |mut wire| while wire.receive().is_some() {});
    let reader = engine("reader", &[TransportKind::Cma, TransportKind::Tcp]);
    let peer = reader.connect(&address, GUARD).unwrap();
    assert!(!peer.links()[0].usable, "{}", peer.links()[0].detail);
    reader.close();
    owner.join().unwrap();
}

/// An engine, and an initiator's session with it.
fn session_with(engine: &Engine) -> (Wire, HelloAck) {
    let mut wire = Wire::connect(engine.address().unwrap());
    let ack = wire.shake_hands_as(hello_from_here());
    (wire, ack)
}

fn knock(ack: &HelloAck) -> UnixStream {
    knock_at(&ack.hello.host.local_socket)
}

fn knock_at(door: &str) -> UnixStream {
    let address = SocketAddr::from_abstract_name(door).unwrap();
    UnixStream::connect_addr(&address).unwrap()
}

#[test]
fn more_askers_than_are_answered_at_once_wait_for_their_turn() {
    let engine = engine("owner", &[TransportKind::Shm]);
    let (_wire, ack) = session_with(&engine);
    let idle: Vec<_> = (0..64).map(|_| knock(&ack)).collect();
    let mut next = knock(&ack);
    next.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let silence = next.read(&mut [0]).expect_err("it is not turned away");
    assert!(
        matches!(silence.kind(), IoKind::WouldBlock | IoKind::TimedOut),
        "{silence}"
    );
    ask_for_nothing(&mut next, &ack);
    drop(idle);
    assert_eq!(answer(&mut next), [END]);
    engine.close();
}

/// Asks for a region that there is not.
fn ask_for_nothing(stream: &mut UnixStream, ack: &HelloAck) {
    let mut question = [MAGIC.as_slice(), &[0; 4], ack.token.as_bytes(), &1_u32.to_le_bytes()].concat();
    question.extend(99_u64.to_le_bytes());
    stream.write_all(&question).unwrap();
}

/// All that comes.
fn answer(stream: &mut UnixStream) -> Vec<u8> {
    stream.set_read_timeout(Some(GUARD)).unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).expect("its turn comes");
    all
}

/// Knocks without a word, until one is told that there are too many; keeps them all.
fn crowd(door: &str) -> Vec<UnixStream> {
    // So many may be answered or wait.
    let mut crowd: Vec<_> = (0..16 + 96).map(|_| knock_at(door)).collect();
    for _ in 0..1000 {
        let mut last = knock_at(door);
        let said = answer(&mut last);
        if said == [FULL] {
            return crowd;
        }
        // One of the first was hung up on meanwhile.
        assert!(said.is_empty(), "{said:?}");
        crowd.push(last);
    }
    panic!("nobody is turned away")
}

/// Not a test of its own: a neighbour that takes all it gets at the local socket that it is told, until it is killed.
#[test]
fn child() {
    if !is_child() {
        return;
    }
    let mut kept = Vec::new();
    obey(|words| {
        kept.extend(crowd(words[0]));
        "full".to_owned()
    });
}

#[test]
fn a_process_that_takes_all_it_gets_is_told_so_and_keeps_nobody_else_out() {
    let engine = engine("owner", &[TransportKind::Shm]);
    let (_wire, ack) = session_with(&engine);
    let mut child = Child::start("child", &[]);
    assert_eq!(child.ask(&ack.hello.host.local_socket), "full");
    let mut other = knock(&ack);
    ask_for_nothing(&mut other, &ack);
    assert_eq!(answer(&mut other), [END]);
    child.kill();
    engine.close();
}

#[test]
fn who_is_turned_away_takes_another_way_and_asks_again() {
    let owner = engine("owner", &[TransportKind::Shm]);
    let there = owner.register(allocate(Memory::Shared, LEN), None, true).unwrap();
    there.memory().fill(0, LEN, 7).unwrap();
    let reader = engine("reader", &[TransportKind::Shm]);
    let here = reader.register(allocate(Memory::Private, LEN), None, true).unwrap();
    let (_wire, ack) = session_with(&owner);
    // They share this process with the reader.
    let kept = crowd(&ack.hello.host.local_socket);
    let peer = reader.connect(owner.address().unwrap(), GUARD).unwrap();
    let (near, far) = whole(here.id(), there.id(), LEN);
    let read = || peer.read(&near, &far, None, &RawOptions::default());
    let error = read().map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("as many questions of this process"), "{error}");
    drop(kept);
    let end = std::time::Instant::now() + GUARD;
    while let Err(error) = read().and_then(|transfer| transfer.wait(WAIT)) {
        assert!(std::time::Instant::now() < end, "{error}");
        std::thread::sleep(Duration::from_millis(50));
    }
    owner.close();
    reader.close();
}

#[test]
fn an_asker_that_drips_is_hung_up_on() {
    let engine = engine("owner", &[TransportKind::Shm]);
    let (_wire, ack) = session_with(&engine);
    let mut stream = knock(&ack);
    let mut question = [MAGIC.as_slice(), &[0; 4], ack.token.as_bytes()].concat();
    question.extend((1_u32 << 16).to_le_bytes());
    stream.write_all(&question).unwrap();
    // Each byte in time, and all of them in hours.
    let end = std::time::Instant::now() + GUARD;
    while stream.write_all(&[0]).is_ok() {
        assert!(std::time::Instant::now() < end, "nobody hangs up");
        std::thread::sleep(Duration::from_millis(50));
    }
    engine.close();
}
