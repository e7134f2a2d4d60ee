//! Lanes with somebody else at the other end: garbage, overreach, pieces that nobody asked for, halves and
//! silence. Each is refused or cut off, memory outside what was granted stays as it is, and the engine
//! goes on serving others.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use common::fake::{self, Wire, hello};
use common::lane::{self, Player, answer, ask, frame, next, offer, request, word, words};
use common::ucx::{self, Lane};
use common::{BLOCK_BYTES, LAYERS, LEASE, Memory, WAIT, Way, allocate, cache, table};
use pdkv_core::ErrorKind;
use pdkv_core::id::{RegionId, SessionToken};
use pdkv_core::reference::Reference;
use pdkv_core::wire::{Claim, Hello, HelloAck, Message, RegionAdvert};
use pdkv_engine::{Engine, KvCache, LocalSpan, PullOptions, RawOptions, RemoteSpan};

struct Scene {
    engine: Engine,
    cache: KvCache,
    address: String,
    way: Way,
}

/// An owner that serves lanes; `None` where there is no UCX.
fn scene(lane: Lane) -> Option<Scene> {
    if !ucx::is_here() {
        return None;
    }
    let way = Way::from(lane);
    let engine = way.engine("producer");
    let cache = cache(&engine, Memory::Private);
    common::fill(&cache, cache.memory(), 1);
    let address = engine.address().unwrap().to_owned();
    Some(Scene {
        engine,
        cache,
        address,
        way,
    })
}

const PUTS: Lane = Lane::puts("tcp");
const MESSAGES: Lane = Lane::messages("tcp");

impl Scene {
    /// A session, and the side channel of a lane in it.
    fn knock(&self) -> (Wire, HelloAck, TcpStream) {
        let mut wire = Wire::connect(&self.address);
        let ack = wire.shake_hands();
        let stream = lane::open(&self.address, ack.token);
        (wire, ack, stream)
    }

    /// An honest consumer still gets what it asks for.
    fn still_serves(&self) {
        let consumer = self.way.engine("consumer");
        let target = cache(&consumer, Memory::Private);
        consumer.connect(&self.address, Duration::from_secs(30)).unwrap();
        let export = self.cache.export(table(&[5]), 4, b"", 1, LEASE).unwrap();
        target
            .pull(export.reference(), table(&[6]), &PullOptions::default())
            .unwrap()
            .wait(WAIT)
            .unwrap();
        for layer in 0..LAYERS {
            let got = common::read(&target, target.memory(), layer, 6);
            assert_eq!(got, common::expected(1, layer, 5));
        }
    }

    /// The block is as it was filled.
    fn untouched(&self, block: u32) {
        for layer in 0..LAYERS {
            let got = common::read(&self.cache, self.cache.memory(), layer, block);
            assert_eq!(got, common::expected(1, layer, block), "layer {layer} block {block}");
        }
    }
}

fn claim(transfer: u64, reference: &Reference, fingerprint: [u8; 32]) -> Message {
    Message::Claim(Box::new(Claim {
        transport: "ucx".to_owned(),
        ..fake::claim(transfer, reference, fingerprint)
    }))
}

#[test]
fn garbage_on_a_side_channel_ends_the_lane_and_nothing_else() {
    let Some(scene) = scene(MESSAGES) else { return };
    let huge = {
        let mut raw = frame(lane::OFFER, &[]);
        raw[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        raw
    };
    let mut half = offer(true, &[7; 400]);
    half.truncate(60);
    let inputs: [&[u8]; 6] = [
        &[0xEE; 64],
        &huge,
        &frame(99, &[]),
        &frame(lane::READY, &[]),
        &frame(lane::WANT_KEY, &[0; 8]),
        &ask(1, &request(false, false, 1, 0, 1, 64)),
    ];
    for input in inputs {
        let (_wire, _, mut stream) = scene.knock();
        stream.write_all(input).unwrap();
        assert_eq!(next(&mut stream), None, "{input:?}");
    }
    let (_wire, _, mut stream) = scene.knock();
    stream.write_all(&half).unwrap();
    drop(stream);
    scene.still_serves();
}

#[test]
fn addresses_that_are_none_are_declined() {
    let Some(scene) = scene(MESSAGES) else { return };
    for address in [vec![], vec![0xEE; 16], vec![0; 64 << 10], (0..=255).collect()] {
        let (_wire, _, mut stream) = scene.knock();
        stream.write_all(&offer(true, &address)).unwrap();
        assert_eq!(next(&mut stream).map(|(kind, _)| kind), Some(lane::DECLINE));
        assert_eq!(next(&mut stream), None);
    }
    scene.still_serves();
}

#[test]
fn a_lane_needs_a_session_and_a_session_has_few_lanes() {
    let Some(scene) = scene(MESSAGES) else { return };
    let mut wire = Wire::connect(&scene.address);
    let ack = wire.shake_hands();
    let forged = std::panic::catch_unwind(|| lane::open(&scene.address, SessionToken::new([0; 16])));
    assert!(forged.is_err(), "a lane without a session was greeted");
    // Silent ones, as many as a session may have, and one more.
    let mut silent: Vec<_> = (0..5).map(|_| lane::open(&scene.address, ack.token)).collect();
    let mut last = silent.pop().unwrap();
    assert_eq!(last.read(&mut [0]).unwrap_or(0), 0, "the fifth lane is served");
    scene.still_serves();
    drop(wire);
    for stream in &mut silent {
        assert_eq!(next(stream), None, "a lane outlives its session");
    }
}

#[test]
fn an_owner_that_wants_no_puts_offers_messages_instead() {
    let Some(scene) = scene(MESSAGES) else { return };
    let (_wire, _, stream) = scene.knock();
    let mut player = Player::new(stream, "tcp", true);
    let address = player.worker.address().unwrap();
    for _ in 0..2 {
        player.send(&offer(false, &address));
        let decline = player.expect(lane::DECLINE);
        assert_eq!(word(&decline, 0), 0, "it was the last word");
    }
    player.send(&offer(true, &address));
    player.expect(lane::ACCEPT);
    scene.still_serves();
}

#[test]
fn keys_are_for_registered_regions_and_for_lanes_that_agreed_on_puts() {
    let Some(scene) = scene(PUTS) else { return };
    let (_wire, ack, stream) = scene.knock();
    let kv = ack.hello.regions[0].id.0;
    let mut player = Player::new(stream, "tcp", true);
    let address = player.worker.address().unwrap();
    player.send(&offer(false, &address));
    player.expect(lane::ACCEPT);
    player.send(&frame(lane::VERDICT, &words(&[2])));
    player.expect(lane::READY);
    for unknown in [0, kv + 77, u64::MAX] {
        player.send(&frame(lane::WANT_KEY, &words(&[unknown])));
        assert_eq!(word(&player.expect(lane::NO_KEY), 0), unknown);
    }
    player.send(&frame(lane::WANT_KEY, &words(&[kv])));
    assert_eq!(word(&player.expect(lane::KEY), 0), kv);
    // Whether a GPU sees what was written: no region, and one of the host, which needs no looking.
    for (region, refused) in [(u64::MAX, true), (kv, false)] {
        player.send(&frame(lane::LAND, &words(&[7, region])));
        let landed = player.expect(lane::LANDED);
        assert_eq!((word(&landed, 0), landed.len() > 8), (7, refused));
    }
    // Requests are of the other manner.
    player.send(&ask(1, &request(false, false, 1, 0, 1, 64)));
    assert_eq!(player.next(), None);
    scene.still_serves();
}

#[test]
fn no_keys_where_puts_were_not_agreed_on() {
    let Some(scene) = scene(MESSAGES) else { return };
    let (_wire, ack, stream) = scene.knock();
    let (mut player, _endpoint) = lane::messages(stream, "tcp");
    player.send(&frame(lane::WANT_KEY, &words(&[ack.hello.regions[0].id.0])));
    assert_eq!(player.next(), None, "a key on a lane of messages");
    // This one lets the kernel put, and what it hears of is emulation.
    let scene = self::scene(Lane::kernel("tcp")).unwrap();
    let (_wire, ack, stream) = scene.knock();
    let mut player = Player::new(stream, "tcp", true);
    player.send(&offer(false, &player.worker.address().unwrap()));
    if player.next().map(|(kind, _)| kind) == Some(lane::ACCEPT) {
        player.send(&frame(lane::VERDICT, &words(&[2])));
        player.expect(lane::DECLINE);
    }
    player.send(&frame(lane::WANT_KEY, &words(&[ack.hello.regions[0].id.0])));
    assert_eq!(player.next(), None, "a key for puts that the policy forbids");
}

#[test]
fn a_lane_of_messages_serves_only_what_was_granted() {
    let Some(scene) = scene(MESSAGES) else { return };
    let export = scene.cache.export(table(&[1, 2]), 8, b"", 1, LEASE).unwrap();
    let region = scene
        .engine
        .register(allocate(Memory::Private, 4096), None, true)
        .unwrap();
    let (mut wire, ack, stream) = scene.knock();
    let kv = ack.hello.regions[0].id.0;
    let (mut player, _endpoint) = lane::messages(stream, "tcp");
    let refused = |player: &mut Player, id: u64, request: &[u8]| {
        player.send(&ask(id, request));
        answer(player, id)
    };
    let none = refused(&mut player, 1, &request(false, false, 77, 0, 1, BLOCK_BYTES));
    assert_eq!(none, ErrorKind::ReferenceUnknown as u16, "no claim");
    wire.send(&claim(1, export.reference(), scene.cache.fingerprint()));
    assert!(matches!(wire.receive(), Some(Message::Grant(_))));
    let more = refused(&mut player, 2, &request(false, false, 1, 0, u64::MAX, BLOCK_BYTES));
    assert_eq!(more, ErrorKind::Layout as u16, "more units than claimed");
    let bytes = refused(&mut player, 3, &request(false, false, 1, 0, 1, 1 << 20));
    assert_eq!(bytes, ErrorKind::Layout as u16, "other bytes than the units have");
    let put = refused(&mut player, 4, &request(true, false, 1, 0, 1, BLOCK_BYTES));
    assert_eq!(put, ErrorKind::Region as u16, "an export can't be written");
    let zero = refused(&mut player, 0, &request(false, false, 1, 0, 1, BLOCK_BYTES));
    assert_eq!(zero, ErrorKind::Capacity as u16, "the number of the hello");
    let span = |id: u64, offset: u64, len: u64| [request(true, true, 0, 0, 1, len), words(&[id, offset, len])].concat();
    assert_eq!(
        refused(&mut player, 5, &span(kv, 0, 64)),
        ErrorKind::Region as u16,
        "KV blocks"
    );
    for (offset, len) in [(4095, 2), (u64::MAX, 2), (0, 4097)] {
        let outside = refused(&mut player, 6, &span(region.id().0, offset, len));
        assert_eq!(outside, ErrorKind::Region as u16, "{offset} + {len}");
    }
    player.send(&ask(7, &request(false, false, 1, 0, 1, BLOCK_BYTES)));
    assert_eq!(player.arrived(), (words(&[7]), BLOCK_BYTES), "what was granted comes");
    let half = ask(8, &request(true, true, 0, 0, 2, 64)); // two spans announced, none sent
    player.send(&half);
    assert_eq!(player.next(), None);
    scene.still_serves();
}

#[test]
fn payload_is_placed_once_and_only_if_it_was_asked_for() {
    let Some(scene) = scene(MESSAGES) else { return };
    let region = scene
        .engine
        .register(allocate(Memory::Private, 4096), None, true)
        .unwrap();
    let (_wire, _, stream) = scene.knock();
    let (mut player, endpoint) = lane::messages(stream, "tcp");
    let put = |len: u64| [request(true, true, 0, 0, 1, len), words(&[region.id().0, 0, len])].concat();
    let bytes = || {
        let mut bytes = [0; 64];
        region.memory().read_at(0, &mut bytes).unwrap();
        bytes
    };
    // Nobody asked for these: no request, a header of another size, the hello again.
    for header in [&words(&[9])[..], b"", b"nine byte", &[0; 8]] {
        player.message(&endpoint, header, &[0xEE; 64]);
    }
    player.send(&ask(1, &put(64)));
    assert_eq!(word(&player.expect(lane::GO), 0), 1);
    assert_eq!(bytes(), [0; 64]);
    player.send(&ask(1, &put(64)));
    assert_eq!(answer(&mut player, 1), ErrorKind::Capacity as u16, "a number in use");
    player.message(&endpoint, &words(&[1]), &[1; 64]);
    assert_eq!(answer(&mut player, 1), 0);
    assert_eq!(bytes(), [1; 64]);
    // Once more, and one of another size than was said.
    player.message(&endpoint, &words(&[1]), &[2; 64]);
    player.send(&ask(2, &put(64)));
    player.expect(lane::GO);
    player.message(&endpoint, &words(&[2]), &[3; 65]);
    assert_eq!(answer(&mut player, 2), ErrorKind::Layout as u16);
    assert_eq!(bytes(), [1; 64]);
    // One that is called off and comes all the same.
    player.send(&ask(3, &put(64)));
    player.expect(lane::GO);
    player.send(&frame(lane::NEVER, &words(&[3])));
    assert_eq!(answer(&mut player, 3), ErrorKind::TransferCancelled as u16);
    player.send(&ask(4, &put(64)));
    player.expect(lane::GO);
    player.message(&endpoint, &words(&[3]), &[4; 64]);
    player.message(&endpoint, &words(&[4]), &[5; 64]);
    assert_eq!(answer(&mut player, 4), 0);
    assert_eq!(bytes(), [5; 64]);
    scene.still_serves();
}

#[test]
fn a_lane_that_breaks_halfway_through_an_offer_takes_the_claim_back() {
    let Some(scene) = scene(MESSAGES) else { return };
    let offer = scene.cache.offer(table(&[1, 2]), 8, b"", LEASE).unwrap();
    let (mut wire, _, stream) = scene.knock();
    wire.send(&claim(1, offer.reference(), scene.cache.fingerprint()));
    assert!(matches!(wire.receive(), Some(Message::Grant(_))));
    let (mut player, endpoint) = lane::messages(stream, "tcp");
    player.send(&ask(1, &request(true, false, 1, 0, 1, BLOCK_BYTES)));
    player.expect(lane::GO);
    player.message(&endpoint, &words(&[1]), &[9; BLOCK_BYTES as usize]);
    assert_eq!(answer(&mut player, 1), 0);
    player.send(&ask(2, &request(true, false, 1, 1, 1, BLOCK_BYTES)));
    player.expect(lane::GO);
    drop((endpoint, player));
    let revoked = wire.receive();
    assert!(matches!(revoked, Some(Message::Revoke(_))), "{revoked:?}");
    drop(wire);
    assert!(!offer.state().is_ended(), "half an offer counts as filled");
    offer.release().unwrap();
    assert!(offer.wait_quiesced(WAIT));
    for block in [0, 3, 4] {
        scene.untouched(block);
    }
    scene.still_serves();
}

/// What a false owner does with an offer.
type Script = fn(&mut TcpStream);

#[test]
fn owners_that_hang_up_or_talk_nonsense_are_the_reason_against_the_lane() {
    if !ucx::is_here() {
        return;
    }
    let scripts: [(Script, &str); 4] = [
        (|_| {}, "ended the lane"),
        (|stream| stream.write_all(&[0xEE; 64]).unwrap(), "magic"),
        (
            |stream| stream.write_all(&frame(lane::READY, &[])).unwrap(),
            "wrong time",
        ),
        (
            |stream| stream.write_all(&frame(lane::ACCEPT, &words(&[0, 0]))).unwrap(),
            "",
        ),
    ];
    for (script, reason) in scripts {
        let (address, owner) = common::fake::owner_with_streams(hello(), move |mut wire, listener| {
            let mut stream = listener.accept().unwrap().0;
            common::fake::greet_stream(&mut stream);
            let _ = next(&mut stream);
            script(&mut stream);
            drop(stream);
            while wire.receive().is_some() {}
        });
        let consumer = Way::from(MESSAGES).engine("consumer");
        let peer = consumer.connect(&address, Duration::from_secs(30)).unwrap();
        let link = &peer.links()[0];
        assert!(!link.usable && link.detail.contains(reason), "{}", link.detail);
        consumer.close();
        owner.join().unwrap();
    }
}

#[test]
fn requests_that_come_to_nothing_leave_room_for_others() {
    if !ucx::is_here() {
        return;
    }
    let region = RegionAdvert {
        id: RegionId(1),
        len: 4096,
        base_address: 0,
        shared: None,
        raw_access: true,
        name: String::new(),
        device: None,
    };
    let theirs = Hello {
        regions: vec![region],
        ..hello()
    };
    let (address, owner) = common::fake::owner_with_streams(theirs, |_wire, listener| {
        let mut stream = listener.accept().unwrap().0;
        common::fake::greet_stream(&mut stream);
        let mut player = Player::new(stream, "tcp", false);
        let offer = player.expect(lane::OFFER);
        let address = player.worker.address().unwrap();
        let accept = [words(&[0, address.len() as u64]), address].concat();
        player.send(&frame(lane::ACCEPT, &accept));
        assert_eq!(player.arrived(), (vec![0; 8], 0));
        let endpoint = player.connect(&offer[8..]);
        player.message(&endpoint, &[0; 8], b"");
        while let Some((lane::ASK, body)) = player.next() {
            let refusal = words(&[word(&body, 0), ErrorKind::Region as u64, 0]);
            player.send(&frame(lane::ANSWER, &refusal));
        }
    });
    let consumer = Way::from(MESSAGES).engine("consumer");
    let peer = consumer.connect(&address, Duration::from_secs(30)).unwrap();
    let here = consumer.register(allocate(Memory::Private, 4096), None, true).unwrap();
    let (offset, len) = (0, 4096);
    let near = LocalSpan {
        region: here.id(),
        offset,
        len,
    };
    let far = RemoteSpan {
        region: RegionId(1),
        offset,
        len,
    };
    // More than may be under way at once.
    for round in 0..100 {
        let read = peer.read(&[near], &[far], None, &RawOptions::default()).unwrap();
        assert_eq!(read.wait(WAIT).unwrap_err().kind(), ErrorKind::Region, "{round}");
    }
    consumer.close();
    owner.join().unwrap();
}

#[test]
fn connect_does_not_wait_for_a_lane_longer_than_it_was_told() {
    if !ucx::is_here() {
        return;
    }
    let (address, owner) = common::fake::owner_with_streams(hello(), |mut wire, listener| {
        let mut stream = listener.accept().unwrap().0;
        common::fake::greet_stream(&mut stream);
        let _ = next(&mut stream);
        // Not a word from here on.
        while wire.receive().is_some() {}
        drop(stream);
    });
    let consumer = Way::from(MESSAGES).engine("consumer");
    // Less than a lane may take to be made.
    let peer = consumer.connect(&address, Duration::from_secs(10)).unwrap();
    let link = &peer.links()[0];
    assert!(
        !link.usable && link.detail.contains("still being made"),
        "{}",
        link.detail
    );
    consumer.close();
    owner.join().unwrap();
}
