//! Raw transfers with memory that its allocator replaces, by whatever moves them: none is done for bytes that came from pages which nobody has any more, or
//! went there.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pdkv_core::wire::{self, FrameDecoder, MAX_FRAME, Message, StreamPurpose};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_engine::{Peer, RawOptions, Region, Transfer, TransportKind};

use crate::common::standin::{Hold, count, is_here, is_here_for_ucx, replace};
use crate::common::ucx::{copy_for_gpus, settled};
use crate::common::{Memory, WAIT, await_measurement, engine, memory, whole};
use crate::eventually;
use crate::lanes::{Ends, LEN, PUTS};

/// Between an initiator and an owner who is on another host, as far as the initiator hears.
struct Abroad {
    address: String,
    /// Data streams that went through.
    streams: Arc<AtomicUsize>,
}

impl Abroad {
    fn new(owner: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let streams = Arc::new(AtomicUsize::new(0));
        let (owner, seen) = (owner.to_owned(), Arc::clone(&streams));
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let (near, far) = (near.unwrap(), TcpStream::connect(&owner).unwrap());
                let seen = Arc::clone(&seen);
                std::thread::spawn(move || join(near, far, &seen));
            }
        });
        Self { address, streams }
    }

    fn streams(&self) -> usize {
        self.streams.load(Ordering::Acquire)
    }
}

/// Passes on what one connection says, but for where the owner is.
fn join(mut near: TcpStream, mut far: TcpStream, streams: &AtomicUsize) {
    let first = frame(&mut near);
    if let Message::StreamHello(hello) = &first {
        streams.fetch_add(usize::from(hello.purpose == StreamPurpose::Data), Ordering::Release);
    }
    far.write_all(&wire::encode(&first).unwrap()).unwrap();
    let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    });
    if matches!(first, Message::Hello(_)) {
        let Message::HelloAck(mut ack) = frame(&mut far) else {
            panic!("the hello was not answered")
        };
        "elsewhere".clone_into(&mut ack.hello.host.boot_id);
        near.write_all(&wire::encode(&Message::HelloAck(ack)).unwrap()).unwrap();
    }
    let _ = std::io::copy(&mut far, &mut near);
    let _ = near.shutdown(Shutdown::Both);
}

fn frame(stream: &mut TcpStream) -> Message {
    let mut decoder = FrameDecoder::new(MAX_FRAME);
    loop {
        if let Some(message) = decoder.next().unwrap() {
            return message;
        }
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        decoder.push(&byte);
    }
}

fn start(kind: TransportKind, peer: &Peer, write: bool, here: &Region, there: &Region) -> Result<Transfer> {
    let (near, far) = whole(here.id(), there.describe().region, LEN);
    let options = RawOptions {
        require: Some(kind.into()),
        ..RawOptions::default()
    };
    settled(|| {
        if write {
            peer.write(&far, &near, Some(b"done"), &options)
        } else {
            peer.read(&near, &far, None, &options)
        }
    })
}

fn replaced(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Region, "{error}");
    assert!(error.message().contains("other memory"), "{error}");
}

#[test]
fn a_lane_that_has_a_key_of_what_was_there_before_says_nothing_of_success() {
    let test = "replaced::a_lane_that_has_a_key_of_what_was_there_before_says_nothing_of_success";
    if copy_for_gpus().is_none() || !is_here_for_ucx(test, &[]) {
        return;
    }
    for abroad in [false, true] {
        for write in [false, true] {
            let ends = Ends::new(PUTS);
            let (here, there) = ends.register(Memory::Private, Memory::Segments);
            let between = Abroad::new(ends.owner.address().unwrap());
            let address = if abroad {
                &between.address
            } else {
                ends.owner.address().unwrap()
            };
            let peer = ends.initiator.connect(address, Duration::from_secs(30)).unwrap();
            let run = || {
                start(TransportKind::Ucx, &peer, write, &here, &there)
                    .unwrap()
                    .wait(WAIT)
            };
            run().unwrap();
            run().unwrap();
            // The stream on which its owner was asked is kept for the next question.
            assert_eq!(between.streams(), usize::from(abroad));
            assert_eq!(count("registered memory"), 0, "a stage was made to answer a question");
            replace(there.memory().address());
            replaced(&run().unwrap_err());
            replaced(&run().unwrap_err());
            peer.notify(b"later").unwrap();
            let mut heard = Vec::new();
            while !heard.contains(&b"later".to_vec()) {
                heard.extend(ends.owner.notifications().into_iter().map(|(_, word)| word));
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(heard.len(), 2 * usize::from(write) + 1, "{heard:?}");
        }
    }
}

#[test]
fn what_a_stage_copies_while_its_memory_is_replaced_is_not_done() {
    if !is_here("replaced::what_a_stage_copies_while_its_memory_is_replaced_is_not_done") {
        return;
    }
    let (owner, initiator) = (
        engine("owner", &[TransportKind::Tcp]),
        engine("initiator", &[TransportKind::Tcp]),
    );
    let between = Abroad::new(owner.address().unwrap());
    for address in [owner.address().unwrap(), &between.address] {
        let peer = initiator.connect(address, Duration::from_secs(30)).unwrap();
        for write in [false, true] {
            for theirs in [false, true] {
                let kinds = [Memory::Private, Memory::Segments];
                let here = initiator
                    .register(memory(kinds[usize::from(!theirs)], LEN), None, true)
                    .unwrap();
                let there = owner
                    .register(memory(kinds[usize::from(theirs)], LEN), None, true)
                    .unwrap();
                let movable = if theirs { &there } else { &here };
                let gpu = movable.memory().device().unwrap().gpu().clone();
                await_measurement(&gpu);
                let run = || start(TransportKind::Tcp, &peer, write, &here, &there).unwrap();
                run().wait(WAIT).unwrap();
                let asked = || count("launches") + count("calls cuMemcpyBatchAsync");
                let (held, before) = (Hold::everything(), asked());
                let transfer = run();
                // All who look first have looked by then.
                eventually("the copy", || asked() > before);
                replace(movable.memory().address());
                drop(held);
                replaced(&transfer.wait(WAIT).unwrap_err());
                assert_eq!(transfer.destination(), "invalid");
                assert!(transfer.wait_quiesced(WAIT));
            }
        }
        peer.close();
    }
}
