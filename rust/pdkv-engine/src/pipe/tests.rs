//! What can't be seen from outside: memory that outlives its pipe, and who is kept.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use pdkv_core::ErrorKind;
use pdkv_core::pipe::{ItemHead, TensorHead, ToReceiver};

use crate::peer::Peer;
use crate::{Engine, EngineConfig};

const WAIT: Duration = Duration::from_secs(60);

fn until(mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < WAIT, "it never happened");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn pair() -> (Engine, Engine, Peer) {
    let near = Engine::new("near", EngineConfig::default()).unwrap();
    let far = Engine::new("far", EngineConfig::default()).unwrap();
    let peer = near.connect(far.address().unwrap(), WAIT).unwrap();
    (near, far, peer)
}

/// A pipe whose sender is played here, with an item on its way.
fn within_an_item(far: &Engine, peer: &Peer) -> (TcpStream, super::PipeReceiver) {
    let mut stream = peer.link.pipes.as_ref().unwrap()().unwrap();
    let mut raw = Vec::new();
    ToReceiver::Open { channel: b"p" }.encode(&mut raw).unwrap();
    let head = ItemHead {
        seq: 0,
        tag: b"",
        tensor: Some(TensorHead::new("uint8", &[1 << 20], 1).unwrap()),
    };
    head.begin(&mut raw, false).unwrap();
    stream.write_all(&raw).unwrap();
    let receiver = far.accept_pipe(b"p", None, u64::MAX, WAIT).unwrap().unwrap();
    let mut place = [0; 40];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Once the place is known, nothing more comes.
            while far.shared().registry.private() == 0 {
                receiver.recv(Duration::from_millis(5)).unwrap();
            }
        });
        stream.read_exact(&mut place).unwrap();
    });
    (stream, receiver)
}

#[test]
fn memory_that_may_be_written_is_kept_until_the_writer_is_gone() {
    let (near, far, peer) = pair();
    for closes in [true, false] {
        let (stream, receiver) = within_an_item(&far, &peer);
        let pipes = &far.shared().pipes;
        if closes {
            receiver.close();
        } else {
            drop(receiver);
        }
        assert_eq!((pipes.held(), far.shared().registry.private()), (1, 0));
        std::thread::sleep(Duration::from_millis(600));
        assert_eq!(pipes.held(), 1, "its writer is there");
        drop(stream);
        until(|| pipes.held() == 0);
    }
    // The session's end alone says nothing of the writer.
    let (stream, receiver) = within_an_item(&far, &peer);
    near.close();
    until(|| receiver.recv(Duration::from_millis(5)).is_err());
    assert_eq!(receiver.recv(WAIT).unwrap_err().kind(), ErrorKind::PeerLost);
    assert_eq!(far.shared().pipes.held(), 1);
    drop(stream);
    until(|| far.shared().pipes.held() == 0);
}

#[test]
fn memory_that_may_be_written_outlives_its_engine() {
    let (near, far, peer) = pair();
    let (stream, receiver) = within_an_item(&far, &peer);
    far.close();
    assert_eq!(far.shared().pipes.held(), 1, "its writer is there");
    drop(receiver);
    let shared = std::sync::Arc::downgrade(far.shared());
    drop(far);
    until(|| shared.strong_count() == 0);
    // The last handle may be another thread's, which is about to leave it.
    until(|| super::lobby::left() == 1);
    drop((near, stream));
    until(|| super::lobby::left() == 0);
}

#[test]
fn memory_whose_writer_has_ended_is_not_kept() {
    let (_near, far, peer) = pair();
    let (stream, receiver) = within_an_item(&far, &peer);
    drop(stream);
    assert_eq!(receiver.recv(WAIT).unwrap_err().kind(), ErrorKind::PeerLost);
    assert_eq!((far.shared().pipes.held(), far.shared().registry.private()), (0, 0));
}

/// A pipe that is given up as soon as its name is known.
fn given_up(far: &Engine, peer: &Peer) {
    let before = far.shared().pipes.lock().guests.len();
    let mut stream = peer.link.pipes.as_ref().unwrap()().unwrap();
    let mut raw = Vec::new();
    ToReceiver::Open { channel: b"p" }.encode(&mut raw).unwrap();
    stream.write_all(&raw).unwrap();
    drop(stream);
    until(|| {
        let inner = far.shared().pipes.lock();
        inner.guests.len() > before && super::guest::has_hung_up(&inner.guests[before].stream)
    });
}

#[test]
fn a_pipe_that_was_given_up_is_taken_at_once_by_who_does_not_wait() {
    let (_near, far, peer) = pair();
    given_up(&far, &peer);
    let over = far.accept_pipe(b"p", None, u64::MAX, Duration::ZERO).unwrap().unwrap();
    assert_eq!(over.recv(WAIT).unwrap_err().kind(), ErrorKind::PeerLost);
}

#[test]
fn a_pipe_that_was_given_up_is_kept_while_another_is_about_to_say_its_name() {
    let (_near, far, peer) = pair();
    given_up(&far, &peer);
    // It was told to go on, and the machine is so busy that it says its name much later.
    let mut stream = peer.link.pipes.as_ref().unwrap()().unwrap();
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(400));
        let mut raw = Vec::new();
        ToReceiver::Open { channel: b"p" }.encode(&mut raw).unwrap();
        let head = ItemHead {
            seq: 0,
            tag: b"alive",
            tensor: None,
        };
        head.begin(&mut raw, false).unwrap();
        stream.write_all(&raw).unwrap();
        stream
    });
    let alive = far.accept_pipe(b"p", None, u64::MAX, WAIT).unwrap().unwrap();
    assert_eq!(alive.recv(WAIT).unwrap().unwrap().tag, b"alive");
    drop(late.join().unwrap());
    // One that never says it delays the other's end for a while, not for ever.
    given_up(&far, &peer);
    let silent = peer.link.pipes.as_ref().unwrap()().unwrap();
    let over = far.accept_pipe(b"p", None, u64::MAX, WAIT).unwrap().unwrap();
    assert_eq!(over.recv(WAIT).unwrap_err().kind(), ErrorKind::PeerLost);
    drop(silent);
}
