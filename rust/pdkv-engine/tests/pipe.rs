//! Pipes between two engines of one process: every item whole and in order over every transport, and ends of every kind.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{OWN, Way, engine, every_way, private};
use pdkv_core::ErrorKind;
use pdkv_core::pipe::Strided;
use pdkv_device::HostRegion;
use pdkv_engine::{Engine, EngineConfig, PipeItem, PipeReceiver, PipeSender, PipeTensor, TransportKind, UcxConfig};

const WAIT: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);

struct Scene {
    near: Engine,
    far: Engine,
    peer: pdkv_engine::Peer,
    sender: PipeSender,
    receiver: PipeReceiver,
}

fn scene(way: impl Into<Way>) -> Scene {
    let way = way.into();
    scene_of(way.engine("near"), way.engine("far"))
}

fn scene_of(near: Engine, far: Engine) -> Scene {
    let peer = near.connect(far.address().expect("listens"), WAIT).expect("connects");
    let sender = peer.open_pipe(b"test", 1 << 30).expect("opens");
    let receiver = accept(&far, b"test");
    Scene {
        near,
        far,
        peer,
        sender,
        receiver,
    }
}

fn accept(engine: &Engine, channel: &[u8]) -> PipeReceiver {
    engine
        .accept_pipe(channel, None, u64::MAX, WAIT)
        .expect("accepts")
        .expect("in time")
}

fn bytes(len: u64, seed: u64) -> Vec<u8> {
    (0..len)
        .map(|at| ((at ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8)
        .collect()
}

fn memory(content: &[u8]) -> Arc<HostRegion> {
    let region = private(content.len() as u64);
    region.write_at(0, content).expect("fits");
    region
}

fn send(pipe: &PipeSender, content: &[u8], tag: &[u8]) {
    let shape = [content.len() as u64];
    let tensor = PipeTensor {
        dtype: "uint8",
        shape: &shape,
        itemsize: 1,
    };
    let sent = if content.len() <= 65536 {
        pipe.send_small(tag, Some(tensor), WAIT, &|into| {
            into.copy_from_slice(content);
            Ok(())
        })
    } else {
        let at = Strided::new(&shape, &[1], 1).expect("dense");
        pipe.send_large(tag, tensor, &memory(content), &at, WAIT)
    };
    assert!(sent.expect("sends"));
}

fn receive(pipe: &PipeReceiver) -> PipeItem {
    pipe.recv(WAIT).expect("receives").expect("in time")
}

fn content(item: &PipeItem) -> Vec<u8> {
    item.bytes.as_ref().expect("a tensor").to_vec().expect("readable")
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < WAIT, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until the pipe fails, and how.
fn failure(mut look: impl FnMut() -> pdkv_core::Result<()>) -> ErrorKind {
    let started = Instant::now();
    loop {
        if let Err(error) = look() {
            return error.kind();
        }
        assert!(started.elapsed() < WAIT, "it never failed");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Aborts a pipe and waits until its stream is closed.
fn give_up(pipe: &PipeSender) {
    pipe.abort();
    assert_eq!(
        pipe.closed(WAIT).expect_err("something was lost").kind(),
        ErrorKind::TransferCancelled
    );
    assert!(pipe.closed(WAIT).expect("told"));
}

fn sending_fails(pipe: &PipeSender) -> ErrorKind {
    failure(|| pipe.send_small(b"", None, SHORT, &|_| Ok(())).map(drop))
}

#[test]
fn items_of_every_size_come_whole_and_in_order_over_every_way() {
    for way in every_way() {
        let scene = scene(way);
        let sizes = [0, 1, 1000, 65_536, 65_537, 300_000, 5_000_001, 0, 70_000];
        for (number, &size) in sizes.iter().enumerate() {
            send(&scene.sender, &bytes(size, size), &[number as u8]);
            assert!(
                scene
                    .sender
                    .send_small(b"none", None, WAIT, &|_| Ok(()))
                    .expect("sends")
            );
        }
        for (number, &size) in sizes.iter().enumerate() {
            let item = receive(&scene.receiver);
            assert_eq!(
                (item.tag.as_slice(), item.shape.as_slice()),
                (&[number as u8][..], &[size][..])
            );
            assert_eq!(item.dtype.as_deref(), Some("uint8"));
            assert!(content(&item) == bytes(size, size), "{way:?}: {size} bytes");
            let none = receive(&scene.receiver);
            assert_eq!(
                (none.tag.as_slice(), none.dtype, none.shape.len()),
                (&b"none"[..], None, 0)
            );
        }
        assert!(scene.sender.flushed(scene.sender.accepted(), WAIT).expect("flushes"));
        let path = scene.sender.path().expect("a large item went");
        assert_eq!(path.transport, way.kind);
        let (sent, got) = (scene.sender.stats(), scene.receiver.stats());
        assert_eq!((sent.items, sent.bytes), (got.items, got.bytes));
        assert_eq!(
            sent.direct_bytes + sent.staged_bytes,
            65_537 + 300_000 + 5_000_001 + 70_000,
            "{way:?}"
        );
        assert!(!way.is_direct() || sent.staged_bytes == 0, "{way:?}: {sent:?}");
        scene.sender.close().expect("closes");
        assert!(scene.sender.closed(WAIT).expect("all was received"));
        let end = scene.receiver.recv(WAIT).expect_err("the end");
        assert_eq!(
            (end.kind(), end.context()),
            (ErrorKind::Closed, &[("closed_by", "peer".to_owned())][..])
        );
    }
}

#[test]
fn strided_tensors_come_dense_over_every_way() {
    for way in every_way() {
        let scene = scene(way);
        let base = bytes(4 << 20, 3);
        let region = memory(&base);
        // Long runs, short runs, a turned one, backwards, and one run again and again.
        let cases: [(&[u64], &[i64], u64); 5] = [
            (&[8, 100, 1000], &[300_000, 2000, 1], 1),
            (&[1000, 50], &[1000, 2], 2),
            (&[300, 500], &[2, 900], 4),
            (&[1000, 2000], &[-2000, 1], 1),
            (&[200, 700], &[0, 1], 1),
        ];
        for (shape, strides, itemsize) in cases {
            let at = Strided::new(shape, strides, itemsize).expect("fits");
            let want: Vec<u8> = at
                .offsets(0)
                .flat_map(|from| base[from as usize..(from + at.run_bytes()) as usize].to_vec())
                .collect();
            let tensor = PipeTensor {
                dtype: "any",
                shape,
                itemsize,
            };
            let part = region.part(0, at.reach()).expect("inside");
            assert!(scene.sender.send_large(b"", tensor, &part, &at, WAIT).expect("sends"));
            let item = receive(&scene.receiver);
            assert_eq!(item.shape, shape);
            assert!(content(&item) == want, "{way:?}: {shape:?} by {strides:?}");
        }
    }
}

#[test]
fn memory_is_registered_for_the_sender_alone_and_only_while_the_pipe_is_there() {
    let scene = scene(TransportKind::Tcp);
    let other = engine("other", OWN);
    let nosy = other
        .connect(scene.far.address().expect("listens"), WAIT)
        .expect("connects");
    let mine = other.register(private(4096), None, false).expect("registers");
    send(&scene.sender, &bytes(100_000, 1), b"");
    let item = receive(&scene.receiver);
    let peek = |region| {
        let local = pdkv_engine::LocalSpan {
            region: mine.id(),
            offset: 0,
            len: 4096,
        };
        let remote = pdkv_engine::RemoteSpan {
            region: pdkv_core::id::RegionId(region),
            offset: 0,
            len: 4096,
        };
        nosy.read(&[local], &[remote], None, &pdkv_engine::RawOptions::default())
    };
    // The landing is the first region that the engine has ever registered.
    assert_eq!(peek(1).expect_err("unknown").kind(), ErrorKind::Region);
    drop(item);
    send(&scene.sender, &bytes(100_001, 2), b"");
    let item = receive(&scene.receiver);
    scene.receiver.close();
    assert!(content(&item) == bytes(100_001, 2), "what was received stays");
}

#[test]
fn the_end_of_a_peer_is_the_end_of_its_pipes() {
    let Scene {
        near,
        far,
        sender,
        receiver,
        peer,
    } = scene(TransportKind::Shm);
    send(&sender, &bytes(10, 1), b"before");
    let waits = peer.open_pipe(b"unaccepted", 1).expect("opens");
    // What went out before is still there, and no more.
    until("the item goes out", || sender.queued_bytes() == 0);
    near.close();
    assert_eq!(receive(&receiver).tag, b"before");
    assert_eq!(receiver.recv(WAIT).expect_err("lost").kind(), ErrorKind::PeerLost);
    assert_eq!(receiver.recv(WAIT).expect_err("lost").kind(), ErrorKind::PeerLost);
    assert!(!receiver.alive() && !sender.alive());
    // As its own engine or the other end of the stream told first.
    for pipe in [&sender, &waits] {
        assert!(matches!(sending_fails(pipe), ErrorKind::Closed | ErrorKind::PeerLost));
    }
    until("the peer is lost", || far.peers().is_empty());
    until("its guests go with it", || {
        far.accept_pipe(b"unaccepted", None, u64::MAX, Duration::ZERO)
            .expect("looks")
            .is_none()
    });
}

#[test]
fn the_end_of_the_receivers_engine_is_an_error_of_the_sender() {
    let scene = scene(TransportKind::Shm);
    std::thread::scope(|scope| {
        let blocked = scope.spawn(|| scene.receiver.recv(WAIT).expect_err("closed").kind());
        std::thread::sleep(SHORT);
        scene.far.close();
        assert!(matches!(
            blocked.join().expect("ends"),
            ErrorKind::Closed | ErrorKind::PeerLost
        ));
    });
    let kind = sending_fails(&scene.sender);
    assert!(matches!(kind, ErrorKind::Closed | ErrorKind::PeerLost));
    assert!(scene.sender.flushed(u64::MAX, WAIT).is_err());
    assert_eq!(
        scene
            .far
            .accept_pipe(b"x", None, u64::MAX, WAIT)
            .expect_err("closed")
            .kind(),
        ErrorKind::Closed
    );
    assert!(scene.near.peers().is_empty());
}

#[test]
fn a_pipe_whose_item_has_no_way_breaks_and_both_ends_know() {
    let config = EngineConfig {
        transports: Some(vec![TransportKind::Ucx]),
        ucx: UcxConfig {
            library: Some("/no/such/library".into()),
            ..UcxConfig::default()
        },
        ..EngineConfig::default()
    };
    let near = Engine::new("near", config).expect("starts");
    let scene = scene_of(near, engine("far", OWN));
    send(&scene.sender, &bytes(10, 1), b"small");
    assert_eq!(receive(&scene.receiver).tag, b"small");
    send(&scene.sender, &bytes(100_000, 1), b"large");
    send(&scene.sender, &bytes(10, 1), b"never");
    let error = scene.receiver.recv(WAIT).expect_err("no way");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.message().contains("ucx"), "{error}");
    assert_eq!(sending_fails(&scene.sender), ErrorKind::Unsupported);
    assert_eq!(scene.sender.queued_bytes(), 0);
    // Whoever was told is not told again by the close.
    scene.sender.close().expect("closes");
    assert!(scene.sender.closed(WAIT).expect("told before"));
}

#[test]
fn a_sender_that_is_dropped_gives_up() {
    let scene = scene(TransportKind::Shm);
    send(&scene.sender, &bytes(1 << 20, 1), b"");
    assert_eq!(receive(&scene.receiver).shape, [1 << 20]);
    send(&scene.sender, &bytes(1 << 20, 1), b"");
    drop(scene.sender);
    let kind = failure(|| scene.receiver.recv(SHORT).map(drop));
    assert_eq!(kind, ErrorKind::TransferCancelled);
}

#[test]
fn a_pipe_that_was_given_up_does_not_stand_in_the_way_of_its_successor() {
    let near = engine("near", OWN);
    let far = engine("far", OWN);
    let peer = near.connect(far.address().expect("listens"), WAIT).expect("connects");
    let first = peer.open_pipe(b"same", 1).expect("opens");
    send(&first, &bytes(10, 1), b"first");
    give_up(&first);
    let second = peer.open_pipe(b"same", 1).expect("opens");
    send(&second, &bytes(10, 1), b"second");
    assert_eq!(receive(&accept(&far, b"same")).tag, b"second");
    assert!(
        far.accept_pipe(b"same", None, u64::MAX, SHORT)
            .expect("looks")
            .is_none()
    );
    // Without a successor, its end is to be had after a moment.
    let third = peer.open_pipe(b"same", 1).expect("opens");
    send(&third, &bytes(10, 1), b"third");
    give_up(&third);
    let over = accept(&far, b"same");
    assert_eq!(failure(|| over.recv(SHORT).map(drop)), ErrorKind::TransferCancelled);
}

#[test]
fn unaccepted_pipes_are_few() {
    let near = engine("near", OWN);
    let far = engine("far", OWN);
    let peer = near.connect(far.address().expect("listens"), WAIT).expect("connects");
    let mut kept = Vec::new();
    let error = loop {
        match peer.open_pipe(b"one of many", 1) {
            Ok(pipe) => kept.push(pipe),
            Err(error) => break error.kind(),
        }
        if kept.len() > 64 && !kept.iter().all(PipeSender::alive) {
            break ErrorKind::Capacity;
        }
        assert!(kept.len() < 1000, "they are never too many");
    };
    assert!(matches!(error, ErrorKind::Capacity | ErrorKind::PeerUnreachable));
    // Those whose senders have given up make room for others.
    drop(kept);
    let started = Instant::now();
    loop {
        let again = peer.open_pipe(b"again", 1).expect("opens");
        if far
            .accept_pipe(b"again", None, u64::MAX, Duration::from_secs(1))
            .expect("looks")
            .is_some()
        {
            break;
        }
        drop(again);
        assert!(started.elapsed() < WAIT, "there is never room");
    }
}
