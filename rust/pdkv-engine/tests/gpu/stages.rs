//! Pinned memory that several peers want at once: nobody keeps it from the others, and nobody waits for anybody who waits.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use pdkv_core::ErrorKind;
use pdkv_core::id::Incarnation;
use pdkv_core::reference::Reference;
use pdkv_core::wire::{self, Claim, Message, StreamHello, StreamPurpose};
use pdkv_engine::{
    Engine, EngineConfig, Export, KvCache, LocalSpan, Peer, PullOptions, RawOptions, Region, RemoteSpan, Transfer,
    TransportKind,
};

use crate::common::fake::{Wire, claim};
use crate::common::lane::request;
use crate::common::standin::is_here;
use crate::common::{BLOCKS, HEADS, LAYERS, LEASE, Memory, TOKENS, WAIT, cache_of, memory, table};

/// Bytes of a token and head: a cache of 48 MiB, more than a socket's buffers take in.
const CONTENT: u64 = 32 << 10;
const UNITS: u64 = LAYERS * BLOCKS as u64;
const BYTES: u64 = UNITS * HEADS * TOKENS * CONTENT;
/// One stage to send from and one to receive into.
const ONE_EACH: u64 = 128 << 10;

fn by_tcp(name: &str, staging_bytes: u64, patience: Duration, streams: usize) -> Engine {
    let config = EngineConfig {
        transports: Some(vec![TransportKind::Tcp]),
        staging_bytes,
        staging_patience: patience,
        // Fakes send no heartbeats.
        peer_timeout: Duration::from_secs(3600),
        tcp_streams: streams,
        ..EngineConfig::default()
    };
    Engine::new(name, config).unwrap()
}

fn whole() -> Vec<u32> {
    (0..BLOCKS).collect()
}

/// An initiator that is granted all of an export or an offer, and then does as it likes.
struct Fake {
    wire: Wire,
    streams: Vec<TcpStream>,
}

impl Fake {
    fn claims(owner: &Engine, reference: &Reference, fingerprint: [u8; 32], streams: usize) -> Self {
        let address = owner.address().unwrap();
        let mut wire = Wire::connect(address);
        let token = wire.shake_hands().token;
        wire.send(&Message::Claim(Box::new(Claim {
            remaining: Duration::from_secs(100),
            ..claim(1, reference, fingerprint)
        })));
        assert!(matches!(wire.receive(), Some(Message::Grant(_))));
        let open = |_| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(WAIT).unwrap();
            let hello = Message::StreamHello(StreamHello {
                token,
                incarnation: Incarnation::new([1; 16]),
                index: 0,
                purpose: StreamPurpose::Data,
            });
            stream.write_all(&wire::encode(&hello).unwrap()).unwrap();
            stream.read_exact(&mut [0]).unwrap();
            stream
        };
        let streams = (0..streams).map(open).collect();
        Self { wire, streams }
    }

    /// Asks for everything, or announces it, on some streams.
    fn request(&mut self, put: bool, streams: std::ops::Range<usize>) {
        for stream in &mut self.streams[streams] {
            stream.write_all(&request(put, false, 1, 0, UNITS, BYTES)).unwrap();
        }
    }

    /// Waits for the header of the first stream's answer: a stage is taken for it.
    fn header(&mut self) {
        self.streams[0].read_exact(&mut [0; 16]).unwrap();
    }

    /// What the owner says when it takes the claim back.
    fn revoked(&mut self) -> ErrorKind {
        match self.wire.receive() {
            Some(Message::Revoke(revoke)) => revoke.fault.kind,
            other => panic!("not revoked: {other:?}"),
        }
    }

    /// Whether the owner has ended the first stream.
    fn is_cut_off(&mut self) -> bool {
        match self.streams[0].read_to_end(&mut Vec::new()) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

fn export(cache: &KvCache) -> Export {
    cache
        .export(table(&whole()), u64::from(BLOCKS) * TOKENS, b"", 9, LEASE)
        .unwrap()
}

/// An honest pull or push of everything.
fn honest(owner: &Engine, cache: &KvCache, put: bool) {
    // One stream, so that no other of its own wants the stage that it has.
    let other = by_tcp("honest", ONE_EACH, Duration::from_secs(3600), 1);
    other
        .connect(owner.address().unwrap(), Duration::from_secs(30))
        .unwrap();
    let mine = cache_of(&other, Memory::Private, CONTENT);
    let options = PullOptions {
        timeout: Duration::from_secs(100),
        ..PullOptions::default()
    };
    let transfer = if put {
        let offer = cache
            .offer(table(&whole()), u64::from(BLOCKS) * TOKENS, b"", LEASE)
            .unwrap();
        mine.push(offer.reference(), table(&whole()), &options)
    } else {
        mine.pull(export(cache).reference(), table(&whole()), &options)
    };
    transfer.unwrap().wait(Some(Duration::from_secs(110))).unwrap();
}

#[test]
fn a_peer_that_does_not_read_keeps_its_part_and_others_go_on() {
    if !is_here("stages::a_peer_that_does_not_read_keeps_its_part_and_others_go_on") {
        return;
    }
    // Two stages to send from, and nobody loses patience.
    let owner = by_tcp("owner", 16 << 20, Duration::from_secs(3600), 2);
    let cache = cache_of(&owner, Memory::Device, CONTENT);
    let granted = export(&cache);
    let mut fake = Fake::claims(&owner, granted.reference(), cache.fingerprint(), 3);
    fake.request(false, 0..1);
    fake.header();
    fake.request(false, 1..3);
    for _ in 0..2 {
        honest(&owner, &cache, false);
    }
    // Its other streams wait: each answer begins once there is a stage for it.
    for stream in &fake.streams[1..] {
        stream.set_nonblocking(true).unwrap();
        let error = stream.peek(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    }
}

#[test]
fn a_peer_that_keeps_the_only_stage_waiting_is_ended_once_others_want_it() {
    if !is_here("stages::a_peer_that_keeps_the_only_stage_waiting_is_ended_once_others_want_it") {
        return;
    }
    let owner = by_tcp("owner", ONE_EACH, Duration::from_millis(300), 2);
    let cache = cache_of(&owner, Memory::Device, CONTENT);
    for put in [false, true] {
        let granted = if put {
            cache
                .offer(table(&whole()), u64::from(BLOCKS) * TOKENS, b"", LEASE)
                .unwrap()
        } else {
            export(&cache)
        };
        let mut fake = Fake::claims(&owner, granted.reference(), cache.fingerprint(), 1);
        fake.request(put, 0..1);
        if put {
            // It begins, and stops in the middle of a stage.
            fake.streams[0].write_all(&[7; 1000]).unwrap();
        } else {
            fake.header();
        }
        honest(&owner, &cache, put);
        assert_eq!(fake.revoked(), ErrorKind::TransferTimeout);
        assert!(fake.is_cut_off());
    }
}

/// Spans of one side, by kind of memory and length.
type Spans = [(Memory, u64)];

/// Memory for spans, each in a region of its own.
fn regions(engine: &Engine, spans: &Spans) -> Vec<Region> {
    let register = |&(kind, len): &(Memory, u64)| engine.register(memory(kind, len), None, true).unwrap();
    spans.iter().map(register).collect()
}

/// Reads, or writes, all of the one from the other: our spans are cut where the peer's are.
fn post(peer: &Peer, write: bool, ours: &[Region], theirs: &[Region]) -> Transfer {
    let lengths = |regions: &[Region]| regions.iter().map(|region| region.memory().len()).collect::<Vec<_>>();
    let [ends, their_ends] = [lengths(ours), lengths(theirs)].map(|lengths| {
        let sum = |at: &mut u64, len: &u64| {
            *at += len;
            Some(*at)
        };
        lengths.iter().scan(0, sum).collect::<Vec<_>>()
    });
    let mut cuts = [ends.clone(), their_ends.clone()].concat();
    cuts.sort_unstable();
    cuts.dedup();
    let (mut near, mut far, mut at) = (Vec::new(), Vec::new(), 0);
    for cut in cuts {
        let place = |ends: &[u64]| {
            let index = ends.partition_point(|&end| end <= at);
            (index, at - index.checked_sub(1).map_or(0, |before| ends[before]))
        };
        let ((mine, my_offset), (other, offset)) = (place(&ends), place(&their_ends));
        near.push(LocalSpan {
            region: ours[mine].id(),
            offset: my_offset,
            len: cut - at,
        });
        far.push(RemoteSpan {
            region: theirs[other].id(),
            offset,
            len: cut - at,
        });
        at = cut;
    }
    // Whoever waits for somebody who waits, waits for ever; whoever is only slow does not.
    let options = RawOptions {
        timeout: Duration::from_secs(600),
        ..RawOptions::default()
    };
    if write {
        peer.write(&far, &near, None, &options).unwrap()
    } else {
        peer.read(&near, &far, None, &options).unwrap()
    }
}

#[test]
fn payloads_that_mix_memory_in_another_order_at_each_end_never_wait_for_each_other() {
    if !is_here("stages::payloads_that_mix_memory_in_another_order_at_each_end_never_wait_for_each_other") {
        return;
    }
    let patience = Duration::from_secs(3600);
    let [left, right] = ["left", "right"].map(|name| by_tcp(name, ONE_EACH, patience, 2));
    // What is host memory at the source is a GPU's at the destination, and longer than it, so that a stage there is begun with bytes of the
    // host and waits for those of the GPU. Beside it goes what holds the source's stage and waits for the destination's.
    let mixed: &Spans = &[
        (Memory::Private, 40_000),
        (Memory::Other, 70_001),
        (Memory::Device, 300_000),
    ];
    let other: &Spans = &[
        (Memory::Device, 200_001),
        (Memory::Private, 10_000),
        (Memory::Other, 200_000),
    ];
    let plain: &Spans = &[(Memory::Device, 6 << 20)];
    let rounds = |here: &Engine, there: &Engine, write: bool| {
        let peer = here.connect(there.address().unwrap(), Duration::from_secs(30)).unwrap();
        let sets = [(mixed, other), (other, mixed), (plain, plain)];
        let sets = sets.map(|(ours, theirs)| (regions(here, ours), regions(there, theirs)));
        for round in 0..2_u8 {
            let from = |index: usize| if write { &sets[index].0 } else { &sets[index].1 };
            for index in 0..sets.len() {
                for region in from(index) {
                    let len = region.memory().len();
                    region.memory().fill(0, len, round + 1 + index as u8).unwrap();
                }
            }
            let order = [2, 0, 1, 0];
            let running: Vec<_> = order
                .map(|index| post(&peer, write, &sets[index].0, &sets[index].1))
                .into();
            for transfer in running {
                transfer.wait(Some(Duration::from_secs(120))).unwrap();
            }
            for (index, (ours, theirs)) in sets.iter().enumerate() {
                for region in if write { theirs } else { ours } {
                    let mut got = vec![0; region.memory().len() as usize];
                    region.memory().read_at(0, &mut got).unwrap();
                    assert!(got.iter().all(|&byte| byte == round + 1 + index as u8));
                }
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| rounds(&left, &right, false));
        scope.spawn(|| rounds(&right, &left, false));
        scope.spawn(|| rounds(&left, &right, true));
    });
}
