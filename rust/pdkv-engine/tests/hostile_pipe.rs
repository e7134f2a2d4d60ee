//! Pipes whose other end lies, stammers or stops: each ends with a typed error, takes no more memory than it should, and
//! the engine goes on.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use common::fake::{self, Wire, hello, hello_from_here};
use common::{OWN, engine, private};
use pdkv_core::ErrorKind;
use pdkv_core::id::{Incarnation, RegionId, SessionToken};
use pdkv_core::pipe::{ItemHead, Strided, TensorHead, ToReceiver, ToSender};
use pdkv_core::session::features;
use pdkv_core::wire::{self, Advertise, Hello, Message, RegionAdvert, StreamHello, StreamPurpose};
use pdkv_engine::{Engine, PipeReceiver, PipeSender, PipeTensor};

const WAIT: Duration = Duration::from_secs(60);

/// A stream of the session that is said to be a pipe.
fn join(address: &str, token: SessionToken) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("the engine listens");
    stream.set_read_timeout(Some(WAIT)).expect("a timeout");
    let hello = StreamHello {
        token,
        incarnation: Incarnation::new([1; 16]),
        index: 0,
        purpose: StreamPurpose::Pipe,
    };
    let raw = wire::encode(&Message::StreamHello(hello)).expect("encodes");
    stream.write_all(&raw).expect("sends");
    let mut ready = [0];
    stream.read_exact(&mut ready).expect("is greeted");
    stream
}

fn say(stream: &mut TcpStream, frame: &ToReceiver<'_>) {
    let mut raw = Vec::new();
    frame.encode(&mut raw).expect("within the caps");
    // The other end may have had enough already.
    let _ = stream.write_all(&raw);
}

/// What the receiver says next; `None` at the end.
fn answer(stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let mut header = [0; 16];
    stream.read_exact(&mut header).ok()?;
    let mut body = vec![0; u32::from_le_bytes(header[8..12].try_into().expect("four bytes")) as usize];
    stream.read_exact(&mut body).ok()?;
    Some((header[4], body))
}

/// An engine, a session with it that the test plays, and the receiving end of the pipe that the test opened.
struct Scene {
    engine: Engine,
    wire: Wire,
    token: SessionToken,
    stream: TcpStream,
    receiver: PipeReceiver,
}

fn scene() -> Scene {
    let engine = engine("receiver", OWN);
    let mut wire = Wire::connect(engine.address().expect("listens"));
    let token = wire.shake_hands_as(hello_from_here()).token;
    let mut stream = join(engine.address().expect("listens"), token);
    say(&mut stream, &ToReceiver::Open { channel: b"p" });
    let receiver = engine
        .accept_pipe(b"p", None, u64::MAX, WAIT)
        .expect("accepts")
        .expect("in time");
    Scene {
        engine,
        wire,
        token,
        stream,
        receiver,
    }
}

fn large(seq: u64, shape: &[u64]) -> ToReceiver<'_> {
    ToReceiver::Item {
        head: ItemHead {
            seq,
            tag: b"",
            tensor: Some(TensorHead::new("uint8", shape, 1).expect("a tensor")),
        },
        inline: None,
    }
}

fn small(seq: u64) -> ToReceiver<'static> {
    ToReceiver::Item {
        head: ItemHead {
            seq,
            tag: b"small",
            tensor: None,
        },
        inline: None,
    }
}

#[test]
fn what_no_sender_says_ends_the_pipe_and_nothing_else() {
    type Script = fn(&mut TcpStream);
    let scripts: [(&str, Script); 9] = [
        ("garbage", |s| drop(s.write_all(&vec![0xEE; 300_000]))),
        ("a number too high", |s| say(s, &small(1))),
        ("the same number twice", |s| {
            say(s, &small(0));
            say(s, &small(0));
        }),
        ("a second name", |s| say(s, &ToReceiver::Open { channel: b"q" })),
        ("nothing placed", |s| say(s, &ToReceiver::Placed { seq: 0 })),
        ("another placed", |s| {
            say(s, &large(0, &[100_000]));
            say(s, &ToReceiver::Placed { seq: 1 });
        }),
        ("an item within another", |s| {
            say(s, &large(0, &[100_000]));
            say(s, &small(1));
        }),
        ("a goodbye too early", |s| say(s, &ToReceiver::Bye { items: 1 })),
        ("a goodbye within an item", |s| {
            say(s, &large(0, &[100_000]));
            say(s, &ToReceiver::Bye { items: 1 });
        }),
    ];
    for (what, script) in scripts {
        let Scene {
            engine,
            mut wire,
            token,
            mut stream,
            receiver,
        } = scene();
        script(&mut stream);
        let error = loop {
            match receiver.recv(WAIT) {
                Ok(item) => assert_eq!(item.expect("in time").tag, b"small", "{what}"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::Integrity, "{what}: {error}");
        assert!(!receiver.alive());
        // Told, and again the same.
        assert_eq!(receiver.recv(WAIT).expect_err("stays").kind(), ErrorKind::Integrity);
        let told = std::iter::from_fn(|| answer(&mut stream)).any(|(kind, _)| kind == 19);
        assert!(told, "{what}: the sender was not refused");
        // The session lives, and so does another pipe of it.
        let mut again = join(engine.address().expect("listens"), token);
        say(&mut again, &ToReceiver::Open { channel: b"again" });
        say(&mut again, &small(0));
        let other = engine
            .accept_pipe(b"again", None, u64::MAX, WAIT)
            .expect("accepts")
            .expect("in time");
        assert_eq!(other.recv(WAIT).expect("receives").expect("in time").tag, b"small");
        wire.send(&Message::Ping(wire::Ping { sequence: 1 }));
    }
}

#[test]
fn an_item_larger_than_the_host_is_no_allocation_and_no_loss() {
    let Scene {
        engine: _engine,
        wire: _wire,
        mut stream,
        receiver,
        ..
    } = scene();
    say(&mut stream, &large(0, &[1 << 47]));
    for _ in 0..3 {
        let error = receiver.recv(WAIT).expect_err("no room");
        assert_eq!(error.kind(), ErrorKind::Capacity);
        assert!(receiver.alive());
    }
    receiver.close();
    assert_eq!(answer(&mut stream).expect("told").0, 20);
}

#[test]
fn an_item_larger_than_the_receiver_takes_ends_the_pipe_at_both_ends() {
    let Scene {
        engine,
        wire: _wire,
        token,
        ..
    } = scene();
    let mut stream = join(engine.address().expect("listens"), token);
    say(&mut stream, &ToReceiver::Open { channel: b"bounded" });
    say(&mut stream, &large(0, &[100_001]));
    let pipe = engine
        .accept_pipe(b"bounded", None, 100_000, WAIT)
        .expect("accepts")
        .expect("in time");
    let error = pipe.recv(WAIT).expect_err("too large");
    assert_eq!(
        (error.kind(), error.retry()),
        (ErrorKind::Capacity, pdkv_core::Retry::Never)
    );
    assert!(!pipe.alive());
    assert_eq!(answer(&mut stream).expect("told").0, 19);
}

#[test]
fn a_sender_that_vanishes_within_an_item_is_lost() {
    let Scene {
        engine: _engine,
        wire: _wire,
        mut stream,
        receiver,
        ..
    } = scene();
    say(&mut stream, &small(0));
    let mut raw = Vec::new();
    small(1).encode(&mut raw).expect("encodes");
    stream.write_all(&raw[..20]).expect("sends");
    drop(stream);
    assert_eq!(receiver.recv(WAIT).expect("whole").expect("in time").tag, b"small");
    let error = receiver.recv(WAIT).expect_err("half");
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert!(error.message().contains("in the middle of an item"), "{error}");
}

#[test]
fn a_sender_that_fails_says_of_what() {
    let Scene {
        engine: _engine,
        wire: _wire,
        mut stream,
        receiver,
        ..
    } = scene();
    say(&mut stream, &large(0, &[100_000]));
    let error = std::thread::scope(|scope| {
        let waits = scope.spawn(|| receiver.recv(WAIT).expect_err("failed"));
        assert_eq!(answer(&mut stream).expect("placed").0, 17);
        let failed = ToReceiver::Failed {
            kind: ErrorKind::Unsupported,
            reason: "no way",
        };
        say(&mut stream, &failed);
        waits.join().expect("ends")
    });
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("no way"));
}

#[test]
fn whoever_does_not_say_its_name_properly_is_no_pipe() {
    let Scene {
        engine,
        wire: _wire,
        token,
        ..
    } = scene();
    let address = engine.address().expect("listens");
    let mut garbage = join(address, token);
    garbage.write_all(&[0xEE; 1000]).expect("sends");
    let mut other = join(address, token);
    say(&mut other, &small(0));
    let mut long = join(address, token);
    say(&mut long, &large(0, &[100_000]));
    for stream in [&mut garbage, &mut other, &mut long] {
        let mut end = Vec::new();
        // A reset is as good: it sent more than was read.
        let _ = stream.read_to_end(&mut end);
        assert!(end.is_empty());
    }
    // Those that say nothing keep nobody out until they are too many, and then are not for long.
    let silent: Vec<_> = (0..10).map(|_| join(address, token)).collect();
    let mut good = join(address, token);
    say(&mut good, &ToReceiver::Open { channel: b"good" });
    let pipe = engine.accept_pipe(b"good", None, u64::MAX, WAIT).expect("accepts");
    assert!(pipe.is_some());
    drop(silent);
}

#[test]
fn a_peer_without_pipes_is_told_apart() {
    let older = Hello {
        features: features::OURS & !features::PIPE,
        ..hello()
    };
    let (address, thread) = fake::owner(older, |mut wire| while wire.receive().is_some() {});
    let sender = engine("sender", OWN);
    let peer = sender.connect(&address, WAIT).expect("connects");
    let error = peer.open_pipe(b"p", 1).expect_err("it has none");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    sender.close();
    thread.join().expect("the script is through");
}

/// A sender to an owner that the test plays: it gets the wire and the stream, past the pipe's name.
fn towards(script: impl FnOnce(Wire, TcpStream) + Send + 'static, test: impl FnOnce(&PipeSender)) {
    let (address, thread) = fake::owner_with_streams(hello(), |wire, listener| {
        let mut stream = listener.accept().expect("a stream").0;
        stream.set_read_timeout(Some(WAIT)).expect("a timeout");
        fake::greet_stream(&mut stream);
        assert_eq!(answer(&mut stream).expect("a name"), (1, b"p".to_vec()));
        script(wire, stream);
    });
    let sender = engine("sender", OWN);
    let peer = sender.connect(&address, WAIT).expect("connects");
    let pipe = peer.open_pipe(b"p", 1 << 30).expect("opens");
    test(&pipe);
    sender.close();
    thread.join().expect("the script is through");
}

fn send_large(pipe: &PipeSender) {
    let shape = [100_000];
    let tensor = PipeTensor {
        dtype: "uint8",
        shape: &shape,
        itemsize: 1,
    };
    let at = Strided::new(&shape, &[1], 1).expect("dense");
    assert!(
        pipe.send_large(b"", tensor, &private(100_000), &at, WAIT)
            .expect("sends")
    );
}

fn reply(stream: &mut TcpStream, frame: &ToSender<'_>) {
    let mut raw = Vec::new();
    frame.encode(&mut raw);
    stream.write_all(&raw).expect("sends");
}

/// Waits for the sender to hang up.
fn drain(mut stream: TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    rest
}

#[test]
fn what_no_receiver_says_ends_the_sender() {
    type Script = fn(&mut TcpStream);
    let scripts: [(&str, Script); 5] = [
        ("garbage", |s| s.write_all(&[0xEE; 64]).expect("sends")),
        ("more items than were sent", |s| {
            reply(s, &ToSender::Received { items: 2 });
        }),
        ("two places", |s| {
            for _ in 0..2 {
                let (seq, region, offset) = (0, RegionId(99), 0);
                reply(s, &ToSender::Place { seq, region, offset });
            }
        }),
        ("a place for another item", |s| {
            let (seq, region, offset) = (7, RegionId(1), 0);
            reply(s, &ToSender::Place { seq, region, offset });
        }),
        ("fewer items than before", |s| {
            reply(s, &ToSender::Received { items: 1 });
            reply(s, &ToSender::Received { items: 0 });
        }),
    ];
    for (what, script) in scripts {
        towards(
            move |_wire, mut stream| {
                assert_eq!(answer(&mut stream).expect("an item").0, 2, "{what}");
                script(&mut stream);
                drain(stream);
            },
            |pipe| {
                send_large(pipe);
                let error = pipe.flushed(2, WAIT).expect_err("ended");
                assert_eq!(error.kind(), ErrorKind::Integrity, "{what}: {error}");
                assert!(!pipe.alive());
            },
        );
    }
}

#[test]
fn a_place_that_is_not_one_is_written_nowhere() {
    let advert = |raw_access, len| RegionAdvert {
        id: RegionId(1),
        len,
        base_address: 0,
        shared: None,
        raw_access,
        name: String::new(),
        device: None,
    };
    for (advert, offset) in [
        (advert(true, 100_000), 1),
        (advert(true, 100_000), u64::MAX),
        (advert(true, 99_999), 0),
        (advert(false, 100_000), 0),
    ] {
        towards(
            move |mut wire, mut stream| {
                assert_eq!(answer(&mut stream).expect("an item").0, 2);
                let (seq, region) = (0, RegionId(1));
                reply(&mut stream, &ToSender::Place { seq, region, offset });
                // The word comes before the advert, as it may.
                std::thread::sleep(Duration::from_millis(150));
                wire.send(&Message::Advertise(Advertise {
                    regions: vec![advert],
                    caches: Vec::new(),
                }));
                assert_eq!(answer(&mut stream).expect("told").0, 4);
                drain(stream);
            },
            |pipe| {
                send_large(pipe);
                let error = pipe.flushed(1, WAIT).expect_err("ended");
                assert_eq!(error.kind(), ErrorKind::Integrity, "{error}");
            },
        );
    }
}

#[test]
fn a_receiver_that_refuses_or_hangs_up_is_heard_although_much_is_queued() {
    for refuses in [true, false] {
        towards(
            move |mut wire, mut stream| {
                // Much is under way, and nobody reads it.
                std::thread::sleep(Duration::from_millis(50));
                if refuses {
                    let (kind, reason) = (ErrorKind::Capacity, "full");
                    reply(&mut stream, &ToSender::Refused { kind, reason });
                }
                // A reset, for nothing was read; the session goes on.
                drop(stream);
                while wire.receive().is_some() {}
            },
            |pipe| {
                let shape = [60_000];
                let tensor = PipeTensor {
                    dtype: "uint8",
                    shape: &shape,
                    itemsize: 1,
                };
                let kind = loop {
                    match pipe.send_small(b"", Some(tensor), Duration::from_millis(1), &|_| Ok(())) {
                        Ok(_) => std::thread::sleep(Duration::from_micros(50)),
                        Err(error) => break error.kind(),
                    }
                };
                let expected = if refuses {
                    ErrorKind::Capacity
                } else {
                    ErrorKind::PeerLost
                };
                assert_eq!(kind, expected);
                assert_eq!(pipe.queued_bytes(), 0);
            },
        );
    }
}
