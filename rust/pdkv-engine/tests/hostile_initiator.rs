//! Initiators that send garbage, forge and overreach: each is refused or cut off, memory outside what
//! was granted stays as it is, and the engine goes on serving others.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

use common::fake::{Wire, claim, hello};
use common::{BLOCKS, LAYERS, LEASE, Memory, WAIT, allocate, cache, engine, table};
use pdkv_core::ErrorKind;
use pdkv_core::id::{Incarnation, SessionToken, TransferId};
use pdkv_core::session::features;
use pdkv_core::wire::{self, Claim, Done, Hello, Message, StreamHello, StreamPurpose};
use pdkv_engine::{Engine, Export, KvCache, PullOptions, TransportKind};

struct Scene {
    engine: Engine,
    cache: KvCache,
    address: String,
}

fn scene() -> Scene {
    let engine = engine("producer", common::OWN);
    let cache = cache(&engine, Memory::Shared);
    common::fill(&cache, cache.memory(), 1);
    let address = engine.address().unwrap().to_owned();
    Scene { engine, cache, address }
}

impl Scene {
    /// An honest consumer still gets what it asks for, and nothing of the producer's memory changed.
    fn still_serves(&self) {
        let consumer = common::engine("consumer", &[TransportKind::Tcp]);
        let target = cache(&consumer, Memory::Private);
        consumer.connect(&self.address, Duration::from_secs(30)).unwrap();
        let export = self.cache.export(table(&[5]), 4, b"", 1, LEASE).unwrap();
        target
            .pull(export.reference(), table(&[6]), &PullOptions::default())
            .unwrap()
            .wait(WAIT)
            .unwrap();
        for layer in 0..LAYERS {
            assert_eq!(
                common::read(&target, target.memory(), layer, 6),
                common::expected(1, layer, 5)
            );
            for block in 0..BLOCKS {
                let bytes = common::read(&self.cache, self.cache.memory(), layer, block);
                assert_eq!(
                    bytes,
                    common::expected(1, layer, block),
                    "layer {layer} block {block} changed"
                );
            }
        }
    }

    fn export(&self) -> Export {
        self.cache.export(table(&[1, 2]), 8, b"secret", 1, LEASE).unwrap()
    }

    /// A data stream of the session, past its greeting.
    fn stream(&self, token: SessionToken) -> TcpStream {
        let stream = self.new_stream(token);
        assert_eq!(word(&stream), Some(READY));
        stream
    }

    fn new_stream(&self, token: SessionToken) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let hello = StreamHello {
            token,
            incarnation: Incarnation::new([1; 16]),
            index: 0,
            purpose: StreamPurpose::Data,
        };
        stream
            .write_all(&wire::encode(&Message::StreamHello(hello)).unwrap())
            .unwrap();
        stream
    }
}

/// The same over the local socket, as `dial.rs` opens it.
fn local_stream(name: &str, token: SessionToken) -> UnixStream {
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut hello = 0x4C44_4B50_u32.to_le_bytes().to_vec();
    hello.extend([1, 0, 0, 0]);
    hello.extend(token.as_bytes());
    (&stream).write_all(&hello).unwrap();
    stream
}

/// What an owner answers to a new stream.
const READY: u8 = 0xA5;
const FULL: u8 = 0x5A;
/// Streams that one peer may have.
const MAX_STREAMS: usize = 128;

/// The owner's answer to a new stream; `None` when it is its end.
fn word(mut stream: impl Read) -> Option<u8> {
    let mut word = [0];
    match stream.read(&mut word) {
        Ok(count) => (count == 1).then_some(word[0]),
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
            None
        }
    }
}

fn refusal(wire: &mut Wire) -> ErrorKind {
    match wire.receive() {
        Some(Message::Refuse(refuse)) => refuse.fault.kind,
        other => panic!("not refused: {other:?}"),
    }
}

/// Whether the other side ends the connection without having said anything.
fn cut_off(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => rest.is_empty(),
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn garbage_on_the_port_is_cut_off() {
    let scene = scene();
    let oversized = u32::MAX.to_le_bytes();
    let inputs: [&[u8]; 4] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &oversized,
        &[4, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF],
        &[0; 64],
    ];
    for input in inputs {
        let mut stream = TcpStream::connect(&scene.address).unwrap();
        stream.write_all(input).unwrap();
        assert!(cut_off(&mut stream), "{input:?}");
    }
    scene.still_serves();
}

#[test]
fn hellos_without_identity_or_common_version_are_refused() {
    let scene = scene();
    let changes: [fn(&mut Hello); 3] = [
        |hello| hello.name.clear(),
        |hello| hello.min_version = 99,
        |hello| hello.features = 0,
    ];
    for change in changes {
        let mut wire = Wire::connect(&scene.address);
        let mut bad = Hello {
            attempt: [7; 16],
            max_version: 99,
            ..hello()
        };
        change(&mut bad);
        wire.send(&Message::Hello(Box::new(bad)));
        assert!(matches!(wire.receive(), Some(Message::HandshakeRefusal(_))));
        assert!(wire.receive().is_none());
    }
    scene.still_serves();
}

#[test]
fn a_stream_needs_the_token_of_a_session() {
    let scene = scene();
    let mut stream = TcpStream::connect(&scene.address).unwrap();
    let hello = StreamHello {
        token: SessionToken::new([0; 16]),
        incarnation: Incarnation::new([1; 16]),
        index: 0,
        purpose: StreamPurpose::Data,
    };
    stream
        .write_all(&wire::encode(&Message::StreamHello(hello)).unwrap())
        .unwrap();
    assert!(cut_off(&mut stream));
    scene.still_serves();
}

#[test]
fn streams_beyond_what_a_peer_may_have_are_refused_by_a_word() {
    let scene = scene();
    let mut wire = Wire::connect(&scene.address);
    let ack = wire.shake_hands();
    let mut streams: Vec<_> = (0..MAX_STREAMS).map(|_| scene.stream(ack.token)).collect();
    let door = ack.hello.host.local_socket;
    for _ in 0..3 {
        assert_eq!(word(scene.new_stream(ack.token)), Some(FULL));
        assert_eq!(word(local_stream(&door, ack.token)), Some(FULL));
    }
    // Nobody else's are fewer.
    scene.still_serves();
    // Each that is closed makes room for another, on either socket.
    drop(streams.drain(..2));
    let over_either: [&dyn Fn() -> Option<u8>; 2] = [&|| word(local_stream(&door, ack.token)), &|| {
        word(scene.new_stream(ack.token))
    }];
    for open in over_either {
        while open() != Some(READY) {
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_release_that_knows_no_such_word_never_hears_it() {
    let scene = scene();
    let mut wire = Wire::connect(&scene.address);
    let older = Hello {
        features: features::OURS & !features::STREAM_ANSWERS,
        ..hello()
    };
    let ack = wire.shake_hands_as(older);
    let streams: Vec<_> = (0..MAX_STREAMS - 1).map(|_| scene.stream(ack.token)).collect();
    // Over the local socket it asks at once.
    let local = local_stream(&ack.hello.host.local_socket, ack.token);
    (&local).write_all(&request(false, false, 77, 0, 1, 256)).unwrap();
    assert_eq!(answer(&mut &local), ErrorKind::ReferenceUnknown as u16);
    assert_eq!(word(scene.new_stream(ack.token)), None);
    assert_eq!(word(local_stream(&ack.hello.host.local_socket, ack.token)), None);
    drop(streams);
    scene.still_serves();
}

#[test]
fn altered_references_and_ranges_are_refused() {
    let scene = scene();
    let export = scene.export();
    let mut wire = Wire::connect(&scene.address);
    wire.shake_hands();
    let print = scene.cache.fingerprint();
    let good = claim(1, export.reference(), print);
    let mut next = 1;
    let mut expect = |change: fn(&mut Claim), kind: ErrorKind| {
        let mut bad = good.clone();
        bad.transfer = TransferId(next);
        next += 1;
        change(&mut bad);
        wire.send(&Message::Claim(Box::new(bad)));
        assert_eq!(refusal(&mut wire), kind);
    };
    expect(|claim| claim.reference.tag[3] ^= 1, ErrorKind::ReferenceForged);
    expect(|claim| claim.reference.num_blocks = 60, ErrorKind::ReferenceForged);
    expect(
        |claim| claim.reference.incarnation = Incarnation::new([8; 16]),
        ErrorKind::ReferenceRestarted,
    );
    expect(
        |claim| claim.expected_digest = Some(b"guess".to_vec()),
        ErrorKind::ReferenceDigest,
    );
    expect(
        |claim| claim.expected_fingerprint = [0; 32],
        ErrorKind::ReferenceFingerprint,
    );
    expect(|claim| claim.num_blocks = 3, ErrorKind::Layout);
    expect(|claim| claim.num_layers = 9, ErrorKind::Layout);
    assert_eq!(export.state().as_str(), "active", "refusals use nothing up");
    scene.still_serves();
}

/// A request on a data stream, as `transport/request.rs` lays it out.
fn request(put: bool, spans: bool, transfer: u64, first: u64, units: u64, bytes: u64) -> Vec<u8> {
    let mut raw = 0x5144_4B50_u32.to_le_bytes().to_vec();
    raw.extend([u8::from(put), u8::from(spans), 0, 0]);
    for word in [transfer, first, units, bytes] {
        raw.extend(word.to_le_bytes());
    }
    raw
}

/// The error code of the answer; 0 for success.
fn answer(stream: &mut impl Read) -> u16 {
    let mut raw = [0; 16];
    stream.read_exact(&mut raw).unwrap();
    let mut message = vec![0; usize::from(u16::from_le_bytes([raw[6], raw[7]]))];
    stream.read_exact(&mut message).unwrap();
    u16::from_le_bytes([raw[4], raw[5]])
}

#[test]
fn a_stream_serves_only_what_was_granted() {
    let scene = scene();
    let export = scene.export();
    let mut wire = Wire::connect(&scene.address);
    let ack = wire.shake_hands();
    let kv_region = ack.hello.regions[0].id.0;
    let mut stream = scene.stream(ack.token);
    stream.write_all(&request(false, false, 77, 0, 1, 256)).unwrap();
    assert_eq!(answer(&mut stream), ErrorKind::ReferenceUnknown as u16, "no claim");
    wire.send(&Message::Claim(Box::new(claim(
        1,
        export.reference(),
        scene.cache.fingerprint(),
    ))));
    assert!(matches!(wire.receive(), Some(Message::Grant(_))));
    stream.write_all(&request(false, false, 1, 0, u64::MAX, 256)).unwrap();
    assert_eq!(answer(&mut stream), ErrorKind::Layout as u16, "more units than claimed");
    stream.write_all(&request(false, false, 1, 0, 1, 1 << 20)).unwrap();
    assert_eq!(
        answer(&mut stream),
        ErrorKind::Layout as u16,
        "other bytes than the units have"
    );
    stream.write_all(&request(true, false, 1, 0, 1, 256)).unwrap();
    stream.write_all(&[0xEE; 256]).unwrap();
    assert_eq!(
        answer(&mut stream),
        ErrorKind::Region as u16,
        "an export can't be written"
    );
    let mut raw = request(true, true, 0, 0, 1, 64);
    for word in [kv_region, 0, 64] {
        raw.extend(word.to_le_bytes());
    }
    raw.extend([0xEE; 64]);
    stream.write_all(&raw).unwrap();
    assert_eq!(
        answer(&mut stream),
        ErrorKind::Region as u16,
        "KV blocks have no raw access"
    );
    wire.send(&Message::Done(Done {
        transfer: TransferId(1),
        bytes: 0,
    }));
    assert!(wire.receive().is_some());
    stream.write_all(&request(false, false, 1, 0, 1, 256)).unwrap();
    assert_eq!(
        answer(&mut stream),
        ErrorKind::ReferenceUnknown as u16,
        "the claim is over"
    );
    stream.write_all(b"no request at all, but forty bytes of it").unwrap();
    assert!(cut_off(&mut stream));
    scene.still_serves();
}

#[test]
fn raw_spans_outside_a_region_are_refused() {
    let scene = scene();
    let region = scene
        .engine
        .register(allocate(Memory::Private, 4096), None, true)
        .unwrap();
    let mut wire = Wire::connect(&scene.address);
    let token = wire.shake_hands().token;
    let mut stream = scene.stream(token);
    for (offset, len) in [(4095, 2), (u64::MAX, 2), (0, 4097)] {
        let mut raw = request(true, true, 0, 0, 1, len);
        for word in [region.id().0, offset, len] {
            raw.extend(word.to_le_bytes());
        }
        raw.resize(raw.len() + len as usize, 0xEE);
        stream.write_all(&raw).unwrap();
        assert_eq!(answer(&mut stream), ErrorKind::Region as u16, "{offset} + {len}");
    }
    let mut bytes = [1; 4096];
    region.memory().read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
    scene.still_serves();
}

#[test]
fn messages_of_the_wrong_role_close_only_that_channel() {
    let scene = scene();
    for wrong in [
        Message::Hello(Box::new(hello())),
        Message::Ack(wire::Ack {
            transfer: TransferId(1),
        }),
    ] {
        let mut wire = Wire::connect(&scene.address);
        wire.shake_hands();
        wire.send(&wrong);
        while wire.receive().is_some() {}
    }
    scene.still_serves();
}

#[test]
fn a_done_after_the_release_is_never_acknowledged() {
    let scene = scene();
    let mut wire = Wire::connect(&scene.address);
    wire.shake_hands();
    let offer = scene.cache.offer(table(&[1, 2]), 8, b"", LEASE).unwrap();
    for (number, pinned) in [(1, scene.export()), (2, offer)] {
        let asked = claim(number, pinned.reference(), scene.cache.fingerprint());
        wire.send(&Message::Claim(Box::new(asked)));
        assert!(matches!(wire.receive(), Some(Message::Grant(_))));
        pinned.release().unwrap();
        // One that was told, and goes on all the same.
        assert!(matches!(wire.receive(), Some(Message::Revoke(_))));
        let (transfer, bytes) = (TransferId(number), 2 * LAYERS * common::BLOCK_BYTES);
        wire.send(&Message::Done(Done { transfer, bytes }));
        let answer = loop {
            match wire.receive() {
                Some(Message::Revoke(_)) => {}
                other => break other,
            }
        };
        let Some(Message::Nack(nack)) = answer else {
            panic!("not refused: {answer:?}")
        };
        assert_eq!(nack.fault.kind, ErrorKind::ReferenceReleased);
    }
    scene.still_serves();
}
