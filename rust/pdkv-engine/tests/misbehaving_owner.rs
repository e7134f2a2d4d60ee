//! Owners that say nothing, half of it, or the wrong thing: the consumer's transfer always ends, and
//! never as done.

mod common;

use std::io::Write;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use common::fake::{Wire, door, hello, owner};
use common::{LAYERS, Memory, WAIT, cache, engine, private, table};
use pdkv_core::id::{CacheId, ExportId, RegionId};
use pdkv_core::reference::{ExportKind, REFERENCE_VERSION, Reference};
use pdkv_core::shard::Shard;
use pdkv_core::wire::{
    Ack, CacheAdvert, Fault, Grant, Hello, HostFacts, Message, Nack, Probe, Refuse, RegionAdvert, Revoke,
};
use pdkv_core::{ErrorKind, Result};
use pdkv_engine::{Engine, KvCache, PullOptions, Transfer, TransportKind};

const NONCE: [u8; 32] = [0x5A; 32];

/// What an owner with one cache in this very process would say of itself.
fn advert(consumer: &KvCache) -> Hello {
    let memory = private(consumer.memory().iter().map(pdkv_device::Memory::len).sum());
    let layout = consumer.layout().clone();
    let mut start = 0;
    let regions: Vec<_> = layout
        .region_bytes()
        .iter()
        .enumerate()
        .map(|(index, &len)| {
            let base_address = memory.address() + start;
            start += len;
            RegionAdvert {
                id: RegionId(index as u64),
                len,
                base_address,
                shared: None,
                raw_access: false,
                name: String::new(),
                device: None,
            }
        })
        .collect();
    let probe = NONCE.to_vec().leak();
    let caches = vec![CacheAdvert {
        id: CacheId(1),
        regions: regions.iter().map(|region| region.id).collect(),
        layout,
        shard: Shard::whole(LAYERS as u32, 2),
        fingerprint: consumer.fingerprint(),
        model: "test".to_owned(),
    }];
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .unwrap_or_default()
        .trim()
        .to_owned();
    let probe = Probe {
        address: probe.as_ptr() as u64,
        nonce: NONCE,
    };
    // The kernel says of whoever listens there that it is this process.
    let (listener, local_socket) = door();
    std::mem::forget(listener);
    let host = HostFacts {
        pid: std::process::id(),
        boot_id,
        local_socket,
        probe: Some(probe),
        ..HostFacts::default()
    };
    Hello {
        regions,
        caches,
        host,
        ..hello()
    }
}

fn reference(fingerprint: [u8; 32]) -> Reference {
    Reference {
        version: REFERENCE_VERSION,
        kind: ExportKind::Export,
        engine: "fake".to_owned(),
        address: String::new(),
        incarnation: hello().incarnation,
        export_id: ExportId::new([4; 16]),
        cache: CacheId(1),
        digest: Vec::new(),
        fingerprint,
        num_tokens: 8,
        num_blocks: 2,
        consumers: 1,
        tag: [0; 16],
    }
}

struct Scene {
    engine: Engine,
    target: KvCache,
    transfer: Transfer,
    owner: std::thread::JoinHandle<()>,
}

/// A consumer that pulls two blocks by CMA from an owner which follows `script` after the claim.
fn pull_from(timeout: Duration, script: impl FnOnce(Wire, pdkv_core::wire::Claim) + Send + 'static) -> Scene {
    let engine = engine("consumer", &[TransportKind::Cma]);
    let target = cache(&engine, Memory::Private);
    common::fill(&target, target.memory(), 2);
    let (address, owner) = owner(advert(&target), move |mut wire| {
        let Some(Message::Claim(claim)) = wire.receive() else {
            panic!("no claim came")
        };
        script(wire, *claim);
    });
    engine.connect(&address, Duration::from_secs(30)).unwrap();
    let options = PullOptions {
        timeout,
        ..PullOptions::default()
    };
    let transfer = target
        .pull(&reference(target.fingerprint()), table(&[1, 2]), &options)
        .unwrap();
    Scene {
        engine,
        target,
        transfer,
        owner,
    }
}

impl Scene {
    /// For scripts that hold the connection until the consumer's engine closes it.
    fn closed_after(self, kinds: &[ErrorKind], destination: &str) {
        let error = self.transfer.wait(WAIT).unwrap_err();
        assert!(kinds.contains(&error.kind()), "{error:?}");
        assert_eq!(self.transfer.destination(), destination);
        self.engine.close();
        self.owner.join().unwrap();
    }

    fn ends_with(self, kind: ErrorKind, destination: &str) {
        let error = self.transfer.wait(WAIT).unwrap_err();
        assert_eq!(error.kind(), kind, "{error:?}");
        assert_eq!(self.transfer.destination(), destination);
        assert!(self.transfer.wait_quiesced(WAIT));
        let untouched = (1..3)
            .all(|block| common::read(&self.target, self.target.memory(), 0, block) == common::expected(2, 0, block));
        assert!(
            untouched || destination == "invalid",
            "an untouched destination was touched"
        );
        self.owner.join().unwrap();
    }
}

fn grant(claim: &pdkv_core::wire::Claim, ids: &[u32]) -> Message {
    Message::Grant(Grant {
        transfer: claim.transfer,
        cache: CacheId(1),
        num_blocks: ids.len() as u32,
        blocks: Some(table(ids)),
        remaining: Duration::from_secs(60),
    })
}

fn fault(kind: ErrorKind) -> Fault {
    Fault {
        kind,
        message: "as the test wants".to_owned(),
        hint: String::new(),
    }
}

/// Reads until the other side closes, so that the owner outlives what the test looks at.
fn drain(mut wire: Wire) {
    while wire.receive().is_some() {}
}

const SOON: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(60);

#[test]
fn a_cache_that_a_silent_owner_never_told_of_holds_no_caller_up() {
    let engine = engine("consumer", &[TransportKind::Cma]);
    let target = cache(&engine, Memory::Private);
    // It answers no ping, so nobody knows whether it has such a cache.
    let (address, owner) = owner(advert(&target), drain);
    engine.connect(&address, Duration::from_secs(30)).unwrap();
    let unknown = Reference {
        cache: CacheId(99),
        ..reference(target.fingerprint())
    };
    let started = Instant::now();
    for _ in 0..200 {
        let refused = target
            .pull(&unknown, table(&[1, 2]), &PullOptions::default())
            .unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::TransferTimeout, "{refused:?}");
    }
    // Far from what a raw transfer may take, from the deadline of the pull, and from a wait for each.
    assert!(started.elapsed() < Duration::from_secs(60));
    engine.close();
    owner.join().unwrap();
}

#[test]
fn silence_after_the_claim_ends_by_deadline_untouched() {
    pull_from(SOON, |mut wire, claim| {
        let Some(Message::Abandon(abandon)) = wire.receive() else {
            panic!("the owner was not told")
        };
        assert_eq!(abandon.transfer, claim.transfer);
    })
    .ends_with(ErrorKind::TransferTimeout, "untouched");
}

#[test]
fn silence_after_done_ends_by_deadline_invalid() {
    // A machine that doesn't come as far as to the silence in one time is given a longer one.
    for timeout in [SOON, SOON * 10, LONG] {
        let (told, done) = std::sync::mpsc::channel();
        let scene = pull_from(timeout, move |mut wire, claim| {
            wire.send(&grant(&claim, &[3, 4]));
            let mut next = wire.receive();
            told.send(matches!(next, Some(Message::Done(_)))).unwrap();
            // Neither the fence nor the question after it is answered.
            while !matches!(next, Some(Message::Abandon(_))) {
                next = wire.receive();
            }
        });
        if done.recv().unwrap() {
            return scene.ends_with(ErrorKind::TransferTimeout, "invalid");
        }
        drop(scene);
    }
    panic!("the consumer never said that it was done");
}

#[test]
fn a_fence_that_says_no_makes_the_destination_invalid() {
    pull_from(LONG, |mut wire, claim| {
        wire.send(&grant(&claim, &[3, 4]));
        assert!(matches!(wire.receive(), Some(Message::Done(_))));
        wire.send(&Message::Nack(Nack {
            transfer: claim.transfer,
            fault: fault(ErrorKind::ReferenceReleased),
        }));
        drain(wire);
    })
    .closed_after(&[ErrorKind::ReferenceReleased], "invalid");
}

#[test]
fn a_refusal_leaves_the_destination_untouched() {
    pull_from(LONG, |mut wire, claim| {
        wire.send(&Message::Refuse(Refuse {
            transfer: claim.transfer,
            fault: fault(ErrorKind::ReferenceUsed),
        }));
    })
    .ends_with(ErrorKind::ReferenceUsed, "untouched");
}

#[test]
fn a_grant_of_other_blocks_than_claimed_is_not_used() {
    pull_from(LONG, |mut wire, claim| {
        wire.send(&grant(&claim, &[3]));
        drain(wire);
    })
    .closed_after(&[ErrorKind::Handshake], "untouched");
}

#[test]
fn blocks_out_of_range_in_a_grant_are_not_read() {
    pull_from(LONG, |mut wire, claim| {
        wire.send(&grant(&claim, &[3, 1 << 30]));
        drain(wire);
    })
    .closed_after(&[ErrorKind::Layout], "invalid");
}

#[test]
fn an_early_ack_is_not_believed() {
    pull_from(SOON, |mut wire, claim| {
        wire.send(&Message::Ack(Ack {
            transfer: claim.transfer,
        }));
        while !matches!(wire.receive(), Some(Message::Abandon(_)) | None) {}
    })
    .closed_after(&[ErrorKind::TransferTimeout], "untouched");
}

#[test]
fn a_revocation_ends_the_transfer_with_its_reason() {
    let scene = pull_from(LONG, |mut wire, claim| {
        wire.send(&Message::Revoke(Revoke {
            transfer: claim.transfer,
            fault: fault(ErrorKind::ReferenceReleased),
        }));
        assert!(matches!(wire.receive(), Some(Message::Abandon(_))));
    });
    scene.ends_with(ErrorKind::ReferenceReleased, "untouched");
}

#[test]
fn a_closed_connection_ends_the_transfer() {
    pull_from(LONG, |wire, _| drop(wire)).ends_with(ErrorKind::PeerLost, "untouched");
}

/// Accepts one connection and does `then` with it.
fn listener(then: impl FnOnce(std::net::TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || then(listener.accept().unwrap().0));
    address
}

fn connect(address: &str, timeout: Duration) -> Result<pdkv_engine::Peer> {
    engine("consumer", common::OWN).connect(address, timeout)
}

#[test]
fn handshakes_that_go_wrong_end_with_a_typed_error() {
    let closed = listener(drop);
    assert_eq!(connect(&closed, LONG).unwrap_err().kind(), ErrorKind::PeerUnreachable);
    let (hold, held) = std::sync::mpsc::channel();
    let silent = listener(move |stream| hold.send(stream).unwrap());
    assert_eq!(connect(&silent, SOON).unwrap_err().kind(), ErrorKind::PeerUnreachable);
    drop(held);
    let http = listener(|mut stream| stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap());
    assert_eq!(connect(&http, LONG).unwrap_err().kind(), ErrorKind::Handshake);
    let half = listener(|mut stream| stream.write_all(&[200, 0, 0, 0, 1, 2, 3]).unwrap());
    assert_eq!(connect(&half, LONG).unwrap_err().kind(), ErrorKind::PeerUnreachable);
    let nobody = {
        TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .to_string()
    };
    assert_eq!(connect(&nobody, LONG).unwrap_err().kind(), ErrorKind::PeerUnreachable);
    assert_eq!(connect("no address", LONG).unwrap_err().kind(), ErrorKind::Config);
}

#[test]
fn an_answer_of_another_attempt_or_without_identity_is_refused() {
    for change in [
        |hello: &mut Hello| hello.attempt = [9; 16],
        |hello: &mut Hello| hello.name.clear(),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let mut wire = Wire::new(listener.accept().unwrap().0);
            let Some(Message::Hello(theirs)) = wire.receive() else {
                panic!("no hello")
            };
            let token = pdkv_core::id::SessionToken::new([3; 16]);
            let (Message::HelloAck(mut ack), _) = pdkv_core::session::accept(&hello(), token, *theirs).unwrap() else {
                panic!("not accepted")
            };
            change(&mut ack.hello);
            wire.send(&Message::HelloAck(ack));
            drain(wire);
        });
        assert_eq!(connect(&address, LONG).unwrap_err().kind(), ErrorKind::Handshake);
    }
}
