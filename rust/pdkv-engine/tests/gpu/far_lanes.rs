//! Lanes of UCX between two processes, with memory of GPUs at one end or at both; and their owner killed. As in one process it is UCX's own module for
//! CUDA over the stand-in, and put and get are emulated. So the other way round is left out: UCX itself may end an owner that carries out what was asked
//! by a process that is killed meanwhile.

use std::sync::Arc;
use std::time::Duration;

use pdkv_core::id::RegionId;
use pdkv_core::reference::Reference;
use pdkv_core::{ErrorKind, Result};
use pdkv_engine::{Engine, KvCache, Peer, PullOptions, RawOptions, Region, Transfer, TransferState, TransportKind};

use crate::common::child::Child;
use crate::common::standin::is_here_for_ucx;
use crate::common::ucx::{copy_for_gpus, settled};
use crate::common::{self, BLOCKS, LAYERS, Memory, WAIT, Way, cache, memory, table, whole};
use crate::eventually;
use crate::lanes::{LEN, PUTS, pattern};
use crate::processes::{CHILD, reference};

/// What is pulled from and pushed into at the owner, and what of ours: no two pieces are neighbours.
const THEIRS: [u32; 24] = blocks(50);
const OURS: [u32; 24] = blocks(62);

const fn blocks(last: u32) -> [u32; 24] {
    let mut found = [0; 24];
    let mut at = 0;
    while at < found.len() {
        found[at] = last - 2 * at as u32;
        at += 1;
    }
    found
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Pull,
    Push,
    Read,
    Write,
}

const ALL: [What; 4] = [What::Pull, What::Push, What::Read, What::Write];

fn is_here(test: &str) -> bool {
    copy_for_gpus().is_some() && is_here_for_ucx(&format!("far_lanes::{test}"), &[])
}

/// A process with memory.
fn owner(kind: &str) -> Child {
    Child::start(CHILD, &[("PDKV_TEST_MEMORY", kind), ("PDKV_TEST_LANE", "1")])
}

/// What is needed of an owner for a transfer, said while it lives.
fn grant(child: &mut Child, what: What) -> Option<Reference> {
    let asked = match what {
        What::Pull => "export",
        What::Push => "offer",
        What::Read | What::Write => return None,
    };
    let blocks = THEIRS.map(|block| block.to_string()).join(" ");
    Some(reference(&child.ask(&format!("{asked} {blocks}"))))
}

/// An owner that is our peer.
struct Owner {
    child: Child,
    peer: Peer,
    region: RegionId,
}

/// An engine with memory, which has one peer after the other.
struct Reader {
    engine: Engine,
    cache: KvCache,
    region: Region,
}

impl Reader {
    fn new(kind: Memory) -> Self {
        let engine = Way::from(PUTS).engine("parent");
        let cache = cache(&engine, kind);
        let region = engine.register(memory(kind, LEN), None, true).unwrap();
        Self { engine, cache, region }
    }

    fn meet(&self, kind: &str) -> Owner {
        let mut child = owner(kind);
        let region = RegionId(child.ask(&format!("region {LEN}")).parse().unwrap());
        let peer = self.engine.connect(&child.ask("address"), Duration::from_secs(30));
        let peer = peer.unwrap();
        Owner { child, peer, region }
    }

    fn start(&self, owner: &Owner, what: What, granted: Option<&Reference>) -> Result<Transfer> {
        let (near, far) = whole(self.region.id(), owner.region, LEN);
        let (blocks, raw) = (PullOptions::default(), RawOptions::default());
        settled(|| match (what, granted) {
            (What::Pull, Some(export)) => self.cache.pull(export, table(&OURS), &blocks),
            (What::Push, Some(offer)) => self.cache.push(offer, table(&OURS), &blocks),
            (What::Read, _) => owner.peer.read(&near, &far, None, &raw),
            _ => owner.peer.write(&far, &near, None, &raw),
        })
    }

    /// Has all bytes be what they are before, and what is to be moved what `seed` says.
    fn prepare(&self, owner: &mut Owner, what: What, seed: u64) -> Option<Reference> {
        let [ours, theirs] = [What::Read, What::Write].map(|other| seed + u64::from(what == other));
        common::fill(&self.cache, self.cache.memory(), 2);
        self.region.memory().write_at(0, &pattern(ours)).unwrap();
        owner.child.ask(&format!("stamp {theirs}"));
        grant(&mut owner.child, what)
    }

    /// Whether the first bytes of it, or the last too, are where they belong.
    fn has(&self, owner: &mut Owner, what: What, seed: u64, all: bool) -> bool {
        let pairs = OURS.into_iter().zip(THEIRS).take(if all { OURS.len() } else { 1 });
        let len = if all { LEN } else { 4096 };
        match what {
            What::Pull => came(&self.cache, 1, pairs),
            What::Push => {
                let mut checks = pairs.map(|(ours, theirs)| format!("check 2 {theirs} {ours}"));
                checks.all(|check| owner.child.ask(&check) == "true")
            }
            What::Read => {
                let mut got = vec![0; len as usize];
                self.region.memory().read_at(0, &mut got).unwrap();
                pattern(seed).starts_with(&got)
            }
            What::Write => owner.child.ask(&format!("stamped {seed} {len}")) == "true",
        }
    }

    /// Moves something, and looks at every byte of it.
    fn moves(&self, owner: &mut Owner, what: What) {
        let granted = self.prepare(owner, what, 5);
        let transfer = self.start(owner, what, granted.as_ref()).unwrap();
        transfer.wait(WAIT).unwrap();
        let path = transfer.path();
        assert_eq!(path.transport, TransportKind::Ucx);
        assert!(path.detail.contains("; memory of GPUs over tcp/"), "{}", path.detail);
        assert_eq!(transfer.stats().staged_bytes, 0);
        assert!(transfer.wait_quiesced(WAIT));
        assert!(self.has(owner, what, 5, true), "{what:?}");
        // What lies between was nobody's to write.
        let between = OURS.map(|block| block - 1);
        assert!(came(&self.cache, 2, between.into_iter().zip(between)));
        assert_eq!(owner.child.ask("check 1 51 51"), "true");
    }
}

/// Whether the cache has the blocks (ours, theirs) of one that was filled with `seed`.
fn came(cache: &KvCache, seed: u64, mut pairs: impl Iterator<Item = (u32, u32)>) -> bool {
    pairs.all(|(ours, theirs)| {
        (0..LAYERS)
            .all(|layer| common::read(cache, cache.memory(), layer, ours) == common::expected(seed, layer, theirs))
    })
}

#[test]
fn memory_of_another_process_is_read_and_written_over_a_lane() {
    if !is_here("memory_of_another_process_is_read_and_written_over_a_lane") {
        return;
    }
    for (theirs, ours) in [
        ("device", Memory::Device),
        ("malloc", Memory::Private),
        ("segments", Memory::Other),
        ("private", Memory::Malloc),
        ("shared", Memory::Segments),
    ] {
        let reader = Reader::new(ours);
        let mut owner = reader.meet(theirs);
        for what in ALL {
            reader.moves(&mut owner, what);
        }
        owner.peer.close();
    }
}

/// The end of a transfer whose owner was killed under way, and what comes after it: another owner.
fn ended(reader: &Reader, transfer: &Transfer, what: What, kind: &str) -> Owner {
    let error = transfer.wait(WAIT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{what:?}: {error}");
    assert!(transfer.wait_quiesced(WAIT), "{what:?}");
    assert_eq!(transfer.destination(), "invalid", "{what:?}");
    common::fill(&reader.cache, reader.cache.memory(), 9);
    reader.region.memory().write_at(0, &pattern(9)).unwrap();
    let mut next = reader.meet(kind);
    // Nothing of it comes any more: what was put there has stayed.
    assert!(
        came(&reader.cache, 9, (0..BLOCKS).map(|block| (block, block))),
        "{what:?}"
    );
    assert!(reader.has(&mut next, What::Read, 9, true), "{what:?}");
    reader.moves(&mut next, what);
    next
}

#[test]
fn an_owner_that_is_killed_before_its_first_byte_is_lost_and_the_next_one_serves() {
    if !is_here("an_owner_that_is_killed_before_its_first_byte_is_lost_and_the_next_one_serves") {
        return;
    }
    for (theirs, ours, all) in [
        ("device", Memory::Malloc, [What::Pull, What::Write]),
        ("malloc", Memory::Private, [What::Push, What::Read]),
    ] {
        let reader = Reader::new(ours);
        let mut owner = reader.meet(theirs);
        for what in all {
            // So that there is a lane and keys, and nothing but bytes is missing.
            reader.moves(&mut owner, what);
            let granted = reader.prepare(&mut owner, what, 7);
            // Its GPU does nothing more, so neither does its UCX.
            assert_eq!(owner.child.ask("hold everything"), "held");
            let transfer = reader.start(&owner, what, granted.as_ref()).unwrap();
            eventually("the grant", || transfer.state() == TransferState::Moving);
            assert!(!transfer.wait_quiesced(Some(Duration::from_millis(20))), "{what:?}");
            owner.child.kill();
            owner = ended(&reader, &transfer, what, theirs);
        }
    }
}

#[test]
fn an_owner_that_is_killed_in_the_middle_is_lost_and_what_is_done_is_whole() {
    if !is_here("an_owner_that_is_killed_in_the_middle_is_lost_and_what_is_done_is_whole") {
        return;
    }
    for (theirs, ours, all) in [
        ("segments", Memory::Device, [What::Pull, What::Write]),
        ("private", Memory::Malloc, [What::Push, What::Read]),
    ] {
        let reader = Reader::new(ours);
        for what in all {
            // One that has brought or taken everything by then was met too late.
            let met = (0..50).any(|_| {
                let mut owner = reader.meet(theirs);
                let granted = reader.prepare(&mut owner, what, 7);
                let transfer = reader.start(&owner, what, granted.as_ref()).unwrap();
                eventually("the first bytes", || reader.has(&mut owner, what, 7, false));
                owner.child.kill();
                if transfer.wait(WAIT).is_err() {
                    ended(&reader, &transfer, what, theirs);
                    return true;
                }
                let inward = matches!(what, What::Pull | What::Read);
                assert!(
                    !inward || reader.has(&mut owner, what, 7, true),
                    "{what:?}: a wrong success"
                );
                false
            });
            assert!(met, "{what:?} can't be met on its way");
        }
    }
}

#[test]
fn an_owner_that_is_killed_while_a_lane_to_it_is_made_holds_up_nobody() {
    if !is_here("an_owner_that_is_killed_while_a_lane_to_it_is_made_holds_up_nobody") {
        return;
    }
    let reader = Reader::new(Memory::Device);
    let mut owner = owner("malloc");
    let (address, export) = (owner.ask("address"), grant(&mut owner, What::Pull).unwrap());
    // Its UCX asks the driver for memory, and waits.
    assert_eq!(owner.ask("hold everything"), "held");
    let engine = reader.engine.clone();
    let connecting = std::thread::spawn(move || engine.connect(&address, Duration::from_secs(30)));
    eventually("its end of the lane", || {
        owner.threads().iter().any(|status| status.contains("pdkv-lane"))
    });
    owner.kill();
    // Whether it is told of a lane that is none, or of the loss, is a race.
    match connecting.join().unwrap() {
        Ok(peer) => eventually("it is lost", || !peer.alive()),
        Err(error) => assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}"),
    }
    let refused = reader.cache.pull(&export, table(&OURS), &PullOptions::default());
    assert_eq!(refused.map(drop).unwrap_err().kind(), ErrorKind::PeerUnreachable);
    reader.moves(&mut reader.meet("malloc"), What::Pull);
}

#[test]
fn an_owner_that_is_killed_while_memory_of_a_gpu_is_tried_holds_up_nobody() {
    if !is_here("an_owner_that_is_killed_while_memory_of_a_gpu_is_tried_holds_up_nobody") {
        return;
    }
    let reader = Reader::new(Memory::Private);
    let owner = &mut reader.meet("private");
    let gpu = reader.engine.register(memory(Memory::Device, LEN), None, true).unwrap();
    let (near, far) = whole(gpu.id(), owner.region, LEN);
    let read = || owner.peer.read(&near, &far, None, &RawOptions::default());
    owner.child.stop();
    // The first that asks has it tried.
    for _ in 0..2 {
        let refused = read().map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.message().contains("being tried"), "{refused}");
    }
    owner.child.kill();
    eventually("it is lost", || !owner.peer.alive());
    assert_eq!(read().map(drop).unwrap_err().kind(), ErrorKind::PeerLost);
    let kept = Arc::downgrade(gpu.memory().device().unwrap());
    gpu.deregister().unwrap();
    drop(gpu);
    eventually("what was tried is let go", || kept.upgrade().is_none());
    reader.moves(&mut reader.meet("malloc"), What::Pull);
}
