//! What a close meets: handshakes under way, writers that are told to stop, peers that come and go.

mod common;

use std::net::TcpListener;
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use common::fake::{Wire, hello, hello_from_here};
use common::{LAYERS, LEASE, Memory, WAIT, cache, engine, table, ucx};
use pdkv_core::ErrorKind;
use pdkv_core::id::{SessionToken, TransferId};
use pdkv_core::reference::Reference;
use pdkv_core::session;
use pdkv_core::wire::{Abandon, Claim, Message};
use pdkv_device::HostRegion;
use pdkv_engine::{Engine, EngineConfig, Export, KvCache, PullOptions, TransportKind};

/// Claims an offer as a one-sided writer would.
fn claim(wire: &mut Wire, transfer: u64, offer: &Reference, cache: &KvCache) {
    wire.send(&Message::Claim(Box::new(Claim {
        transfer: TransferId(transfer),
        reference: offer.clone(),
        expected_digest: None,
        expected_fingerprint: cache.fingerprint(),
        first_block: 0,
        num_blocks: offer.num_blocks,
        first_layer: 0,
        num_layers: LAYERS as u32,
        transport: "cma".to_owned(),
        remaining: Duration::from_secs(60),
        wants_table: true,
        order: None,
    })));
    match wire.receive() {
        Some(Message::Grant(_)) => {}
        other => panic!("not granted: {other:?}"),
    }
}

fn abandon(wire: &mut Wire, transfer: u64) {
    wire.send(&Message::Abandon(Abandon {
        transfer: TransferId(transfer),
        reason: ErrorKind::TransferCancelled,
    }));
}

/// Handles on processes that this one holds.
fn pidfds() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter(|target| target.to_string_lossy().contains("pidfd"))
        .count()
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < WAIT.unwrap(), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_handshake_that_ends_after_the_close_makes_no_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let engine = engine("engine", &[TransportKind::Tcp]);
    let connecting = {
        let engine = engine.clone();
        std::thread::spawn(move || engine.connect(&address, Duration::from_secs(60)).map(drop))
    };
    let mut wire = Wire::new(listener.accept().unwrap().0);
    let Some(Message::Hello(theirs)) = wire.receive() else {
        panic!("no hello came")
    };
    engine.close();
    let (ack, _) = session::accept(&hello(), SessionToken::new([3; 16]), *theirs).unwrap();
    wire.send(&ack);
    assert_eq!(connecting.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert!(wire.receive().is_none(), "the channel is still open");
    assert_eq!(engine.stats().peers, 0);
}

/// An engine with an offer, and the writer that has claimed it.
fn written_to() -> (Engine, KvCache, Export, Wire) {
    let engine = engine("owner", common::OWN);
    let target = cache(&engine, Memory::Private);
    let offer = target.offer(table(&[1, 2]), 8, b"", LEASE).unwrap();
    let mut wire = Wire::connect(engine.address().unwrap());
    wire.shake_hands();
    claim(&mut wire, 1, offer.reference(), &target);
    (engine, target, offer, wire)
}

#[test]
fn close_waits_until_writers_have_stopped() {
    let (engine, _target, offer, mut wire) = written_to();
    let (told, stop) = mpsc::channel();
    let writer = std::thread::spawn(move || {
        let revoked = matches!(wire.receive(), Some(Message::Revoke(_)));
        told.send(revoked).unwrap();
        abandon(&mut wire, 1);
        wire
    });
    engine.close();
    assert!(stop.recv().unwrap(), "the writer was not told to stop");
    assert!(offer.quiesced(), "closed while a writer was at work");
    drop(writer.join().unwrap());
}

#[test]
fn who_closes_meanwhile_waits_for_the_end_and_gets_the_same_answer() {
    let (engine, _target, offer, mut wire) = written_to();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| engine.close());
        assert!(
            matches!(wire.receive(), Some(Message::Revoke(_))),
            "the writer was not told to stop"
        );
        let second = scope.spawn(|| (engine.close(), offer.quiesced()));
        // Long enough for one that doesn't wait.
        std::thread::sleep(Duration::from_millis(50));
        abandon(&mut wire, 1);
        let answer = first.join().unwrap();
        assert_eq!(
            second.join().unwrap(),
            (answer, true),
            "it answered while a writer was at work"
        );
        assert!(answer);
    });
    assert!(engine.close());
}

/// Memory whose owner closes the engine once more, and deregisters it, when it gets it back.
struct Lender {
    engine: Engine,
    region: mpsc::Receiver<pdkv_engine::Region>,
    heard: mpsc::Sender<(bool, Option<ErrorKind>)>,
}

impl Drop for Lender {
    fn drop(&mut self) {
        let closed = self.engine.close();
        let region = self.region.recv().unwrap();
        let error = region.deregister().err();
        self.heard.send((closed, error.map(|error| error.kind()))).unwrap();
    }
}

#[test]
fn a_lender_that_hears_of_the_close_may_close_too() {
    let bytes = Box::leak(vec![0_u8; 4096].into_boxed_slice());
    let engine = engine("owner", common::OWN);
    let ((give, region), (heard, hears)) = (mpsc::channel(), mpsc::channel());
    let lender = Lender {
        engine: engine.clone(),
        region,
        heard,
    };
    let address = bytes.as_ptr().expose_provenance() as u64;
    // SAFETY: leaked, so it stays.
    let memory = unsafe { HostRegion::from_raw(address, 4096, Box::new(Mutex::new(lender))) };
    drop(engine.register(memory.unwrap(), None, true).unwrap());
    let other = engine
        .register(common::memory(Memory::Private, 64), None, true)
        .unwrap();
    give.send(other).unwrap();
    assert!(engine.close());
    assert_eq!(hears.recv().unwrap(), (true, Some(ErrorKind::Region)));
}

#[test]
fn a_writer_of_this_host_that_lost_its_channel_holds_its_blocks_until_it_reports() {
    let engine = engine("owner", common::OWN);
    let target = cache(&engine, Memory::Private);
    let offer = target.offer(table(&[1, 2]), 8, b"", LEASE).unwrap();
    let before = pidfds();
    let mut wire = Wire::connect(engine.address().unwrap());
    wire.shake_hands_as(hello_from_here());
    claim(&mut wire, 1, offer.reference(), &target);
    drop(wire);
    eventually("the peer is lost", || engine.stats().peers == 0);
    offer.release().unwrap();
    assert!(
        !offer.wait_quiesced(Some(Duration::from_millis(300))),
        "its process is alive"
    );
    let mut again = Wire::connect(engine.address().unwrap());
    again.shake_hands_as(hello_from_here());
    abandon(&mut again, 1);
    assert!(offer.wait_quiesced(WAIT));
    drop(again);
    eventually("its process is watched no more", || pidfds() <= before);
}

#[test]
fn peers_that_come_and_go_leave_nothing_behind() {
    let engine = engine("owner", common::OWN);
    let before = pidfds();
    for _ in 0..50 {
        let mut wire = Wire::connect(engine.address().unwrap());
        wire.shake_hands_as(hello_from_here());
    }
    eventually("the peers are lost", || engine.stats().peers == 0);
    eventually("their processes are let go", || pidfds() <= before);
}

#[test]
fn dropping_the_last_handle_frees_the_port_without_a_wait() {
    let config = |listen: &str| EngineConfig {
        listen: Some(listen.to_owned()),
        ..EngineConfig::default()
    };
    let first = Engine::new("first", config(&common::place_of_its_own())).unwrap();
    let address = first.address().unwrap().to_owned();
    drop(first);
    eventually("the port is free", || Engine::new("second", config(&address)).is_ok());
}

/// Not a test of its own: what the child of the next one does, which finds its lane in the environment.
#[test]
fn child_that_exits_with_lanes_at_work() {
    let Ok(kind) = std::env::var("EXIT_WITH_LANES") else {
        return;
    };
    let lane = if kind.ends_with("puts") {
        ucx::Lane::puts("tcp")
    } else {
        ucx::Lane::messages("tcp")
    };
    let pair = common::Pair::new(lane);
    let all: Vec<u32> = (0..common::BLOCKS).collect();
    let pulls: Vec<_> = (0..8)
        .map(|_| {
            let export = pair.source.export(table(&all), 256, b"", 1, LEASE).unwrap();
            pair.target
                .pull(export.reference(), table(&all), &PullOptions::default())
                .unwrap()
        })
        .collect();
    // Not closed: either the lanes are at work, or they are just being taken apart.
    if kind.starts_with("drop") {
        drop((pair, pulls));
    } else {
        std::mem::forget((pair, pulls));
    }
    std::process::exit(7);
}

#[test]
fn a_process_that_exits_with_lanes_at_work_exits_as_it_said() {
    if !ucx::is_here() {
        return;
    }
    for kind in ["keep puts", "keep messages", "drop puts", "drop messages"].repeat(8) {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_exits_with_lanes_at_work"])
            .env("EXIT_WITH_LANES", kind)
            .stdout(std::process::Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.code(), Some(7), "{kind}: {status}");
    }
}
