//! Raw transfers with memory of a neighbour's GPU that its allocator replaces: they are done when the neighbour has said, after the last byte, that the memory
//! is the one that it registered.

use std::io::Write;
use std::time::Duration;

use pdkv_core::ErrorKind;
use pdkv_core::id::RegionId;
use pdkv_engine::{Engine, Peer, RawOptions, Region, Transfer, TransportKind};

use crate::common::child::Child;
use crate::common::standin::{count, is_here};
use crate::common::{Memory, WAIT, engine, memory, whole};
use crate::doors::{lender, scene_with};
use crate::eventually;

const LEN: u64 = 4096;

/// A neighbour with one region, and an engine with another.
struct Ends {
    child: Child,
    reader: Engine,
    peer: Peer,
    here: Region,
    there: RegionId,
}

impl Ends {
    fn new(kind: &str) -> Self {
        let mut child = Child::start("processes::child", &[("PDKV_TEST_MEMORY", kind)]);
        let there = RegionId(child.ask(&format!("region {LEN}")).parse().unwrap());
        let reader = engine("reader", &[TransportKind::Cuda]);
        let here = reader.register(memory(Memory::Device, LEN), None, true).unwrap();
        let address = child.ask("address");
        let peer = reader.connect(&address, Duration::from_secs(30)).unwrap();
        Self {
            child,
            reader,
            peer,
            here,
            there,
        }
    }

    fn start(&self, write: bool, timeout: Duration) -> pdkv_core::Result<Transfer> {
        let (near, far) = whole(self.here.id(), self.there, LEN);
        let options = RawOptions {
            timeout,
            ..RawOptions::default()
        };
        if write {
            self.peer.write(&far, &near, Some(b"done"), &options)
        } else {
            self.peer.read(&near, &far, None, &options)
        }
    }

    fn run(&self, write: bool) -> pdkv_core::Result<()> {
        self.start(write, Duration::from_secs(60))?.wait(WAIT)
    }

    /// How many have come, once one has.
    fn notifications(&mut self) -> usize {
        loop {
            match self.child.ask("notifications").parse().unwrap() {
                0 => std::thread::sleep(Duration::from_millis(1)),
                count => return count,
            }
        }
    }

    fn looks(&mut self) -> u64 {
        self.child.ask("looks").parse().unwrap()
    }
}

#[test]
fn memory_that_a_neighbour_has_replaced_fails_the_transfer_after_its_last_byte() {
    if !is_here("raw_fence::memory_that_a_neighbour_has_replaced_fails_the_transfer_after_its_last_byte") {
        return;
    }
    for write in [false, true] {
        let mut ends = Ends::new("segments");
        ends.run(write).unwrap();
        if write {
            assert_eq!(ends.notifications(), 1);
        }
        assert_eq!(ends.child.ask("replace"), "replaced");
        let transfer = ends.start(write, Duration::from_secs(60)).unwrap();
        let error = transfer.wait(WAIT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Region, "{error}");
        assert!(error.message().contains("other memory"), "{error}");
        assert_eq!(transfer.destination(), "invalid");
        assert!(transfer.wait_quiesced(WAIT));
        // What is mapped here is of no use any more, and that is known before the next one is begun.
        let error = ends.run(write).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.message().contains("is not what it was"), "{error}");
        // The neighbour has not heard of it: the next word that comes is another one.
        ends.peer.notify(b"later").unwrap();
        assert_eq!(ends.notifications(), 1);
        ends.reader.close();
    }
}

#[test]
fn a_neighbour_is_asked_once_a_transfer_and_only_where_its_memory_may_move() {
    if !is_here("raw_fence::a_neighbour_is_asked_once_a_transfer_and_only_where_its_memory_may_move") {
        return;
    }
    for (kind, looks) in [("segments", 1), ("malloc", 1), ("device", 0)] {
        let mut ends = Ends::new(kind);
        // The names are made, and looked at, with the first.
        ends.run(false).unwrap();
        let before = ends.looks();
        ends.run(false).unwrap();
        ends.run(true).unwrap();
        assert_eq!(ends.looks() - before, 2 * looks, "{kind}");
    }
}

#[test]
fn a_neighbour_whose_driver_cannot_tell_costs_one_transfer() {
    if !is_here("raw_fence::a_neighbour_whose_driver_cannot_tell_costs_one_transfer") {
        return;
    }
    let mut ends = Ends::new("segments");
    ends.run(false).unwrap();
    // The look at all regions, and the one at each of them.
    ends.child.ask("fail cuPointerGetAttribute 2");
    ends.child.ask("fail cuPointerGetAttribute 2");
    let error = ends.run(false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Transfer, "{error}");
    assert!(error.message().contains("could not tell"), "{error}");
    ends.run(false).unwrap();
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn whatever_is_answered_but_yes_fails_the_transfer() {
    if !is_here("raw_fence::whatever_is_answered_but_yes_fails_the_transfer") {
        return;
    }
    let end = words(&[u64::MAX, 0, 0]);
    let yes = words(&[5, 1, 0]);
    let cases: Vec<(&str, Vec<u8>, Option<ErrorKind>)> = vec![
        ("yes", [yes.clone(), end.clone()].concat(), None),
        (
            "no",
            [words(&[5, 0, 3]), b"why".to_vec(), end.clone()].concat(),
            Some(ErrorKind::Region),
        ),
        (
            "not now",
            [words(&[5, u64::MAX, 3]), b"why".to_vec(), end.clone()].concat(),
            Some(ErrorKind::Transfer),
        ),
        (
            "two",
            [words(&[5, 2, 0]), end.clone()].concat(),
            Some(ErrorKind::Region),
        ),
        ("nothing of it", end.clone(), Some(ErrorKind::Handshake)),
        (
            "another region",
            [words(&[6, 1, 0]), end.clone()].concat(),
            Some(ErrorKind::Handshake),
        ),
        (
            "yes twice",
            [yes.clone(), yes.clone(), end.clone()].concat(),
            Some(ErrorKind::Handshake),
        ),
        (
            "a reason without end",
            words(&[5, 0, 1 << 40]),
            Some(ErrorKind::Handshake),
        ),
        ("yes and no end", yes.clone(), Some(ErrorKind::PeerLost)),
        ("half a word", yes[..5].to_vec(), Some(ErrorKind::PeerLost)),
        ("silence and a close", Vec::new(), Some(ErrorKind::PeerLost)),
    ];
    let (_lender, whole) = lender();
    for (what, answer, kind) in cases {
        let whole = whole.clone();
        let scene = scene_with(true, move |asked, mut stream| {
            let answer = if asked == 3 { &answer } else { &whole };
            let _ = stream.write_all(answer);
        });
        let outcome = scene.read(Duration::from_secs(60)).wait(WAIT);
        assert_eq!(outcome.err().map(|error| error.kind()), kind, "{what}");
        scene.close();
    }
}

#[test]
fn a_neighbour_that_never_answers_keeps_no_transfer_that_is_to_stop() {
    if !is_here("raw_fence::a_neighbour_that_never_answers_keeps_no_transfer_that_is_to_stop") {
        return;
    }
    let (_lender, whole) = lender();
    let (say, asked) = std::sync::mpsc::channel();
    let scene = scene_with(true, move |question, mut stream| {
        if question == 3 {
            say.send(stream).unwrap();
        } else {
            stream.write_all(&whole).unwrap();
        }
    });
    // The first is asked about, alone, and the others land behind it.
    let mut transfers = vec![scene.read(Duration::from_secs(3600))];
    let open = asked.recv_timeout(WAIT.unwrap()).expect("a question");
    scene.settle();
    let before = count("launches");
    transfers.extend([0; 2].map(|_| scene.read(Duration::from_secs(3600))));
    eventually("both launches", || count("launches") >= before + 2);
    // One of those behind, the one that is asked about, and the last: none of them waits for the others, which are not over.
    let order = [&transfers[1], &transfers[0], &transfers[2]];
    for (at, transfer) in order.iter().enumerate() {
        assert!(!transfer.wait_quiesced(Some(Duration::from_millis(1))));
        transfer.cancel();
        assert_eq!(transfer.wait(WAIT).unwrap_err().kind(), ErrorKind::TransferCancelled);
        assert!(transfer.wait_quiesced(WAIT));
        assert!(
            !order[at + 1..].iter().any(|other| other.poll()),
            "the neighbour is lost"
        );
    }
    drop(open);
    scene.close();
}
