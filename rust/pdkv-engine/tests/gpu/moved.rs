//! Memory that its allocator has replaced behind the engine's back, as vLLM's sleep mode does: nothing is exported from it, granted,
//! acknowledged or copied into it.

use std::io::Write;
use std::time::Duration;

use pdkv_core::id::TransferId;
use pdkv_core::wire::{self, Done, Message, Status};
use pdkv_core::{Error, ErrorKind};
use pdkv_engine::{KvCache, LocalSpan, PullOptions, RawOptions, RemoteSpan, TransferState, TransportKind};

use crate::common::fake::{Wire, claim};
use crate::common::standin::{Hold, count, fail, is_here, replace};
use crate::common::{self, LEASE, Memory, Pair, WAIT, Way, cache, engine, memory, table};
use crate::{came_over, eventually, looks, pull, pull_under_way};

/// Both kinds of ways: by a kernel of the consumer's, and by threads of the producer's.
fn ways() -> [Way; 2] {
    [
        Way::cuda(Memory::Segments, Memory::Segments),
        Way::staged(Memory::Segments, Memory::Segments),
    ]
}

/// Puts other memory under a cache.
fn move_away(cache: &KvCache) {
    replace(cache.memory()[0].address());
}

fn moved_away(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Region, "{error}");
    assert!(error.message().contains("other memory"), "{error}");
}

#[test]
fn what_was_exported_before_its_memory_was_replaced_is_not_granted() {
    if !is_here("moved::what_was_exported_before_its_memory_was_replaced_is_not_granted") {
        return;
    }
    for way in ways() {
        let pair = Pair::new(way);
        let export = pair.source.export(table(&[5, 6]), 8, b"", 1, LEASE).unwrap();
        let offer = pair.source.offer(table(&[7, 8]), 8, b"", LEASE).unwrap();
        move_away(&pair.source);
        let pulled = pair
            .target
            .pull(export.reference(), table(&[1, 2]), &PullOptions::default())
            .unwrap();
        moved_away(&pulled.wait(WAIT).unwrap_err());
        assert_ne!(pulled.destination(), "valid");
        assert!(pulled.wait_quiesced(WAIT));
        // Once it is known, a claim is not even granted.
        common::fill(&pair.target, pair.target.memory(), 2);
        let again = pair
            .target
            .pull(export.reference(), table(&[1, 2]), &PullOptions::default())
            .unwrap();
        moved_away(&again.wait(WAIT).unwrap_err());
        assert_eq!(again.destination(), "untouched");
        let pushed = pair
            .target
            .push(offer.reference(), table(&[1, 2]), &PullOptions::default())
            .unwrap();
        moved_away(&pushed.wait(WAIT).unwrap_err());
        assert!(pushed.wait_quiesced(WAIT));
        moved_away(&pair.source.export(table(&[5]), 4, b"", 1, LEASE).unwrap_err());
        pair.check(&[], 0..3);
        let block = common::read(&pair.source, pair.source.memory(), 0, 7);
        assert!(block.iter().all(|&byte| byte == 0), "something was written");
    }
}

#[test]
fn memory_that_is_replaced_under_way_fails_at_the_fence() {
    if !is_here("moved::memory_that_is_replaced_under_way_fails_at_the_fence") {
        return;
    }
    let pair = Pair::new(Way::cuda(Memory::Segments, Memory::Device));
    let held = Hold::kernels();
    let transfer = pull_under_way(&pair, &PullOptions::default());
    move_away(&pair.source);
    drop(held);
    moved_away(&transfer.wait(WAIT).unwrap_err());
    assert_eq!(transfer.destination(), "invalid");
    assert!(transfer.wait_quiesced(WAIT));
}

#[test]
fn nothing_is_copied_to_or_from_memory_of_ours_that_was_replaced() {
    if !is_here("moved::nothing_is_copied_to_or_from_memory_of_ours_that_was_replaced") {
        return;
    }
    for way in ways() {
        let pair = Pair::new(way);
        let export = pair.source.export(table(&[5]), 4, b"", 1, LEASE).unwrap();
        let near = pair
            .consumer
            .register(memory(Memory::Segments, 4096), None, true)
            .unwrap();
        let far = pair
            .producer
            .register(memory(Memory::Segments, 4096), None, true)
            .unwrap();
        let span = |region| LocalSpan {
            region,
            offset: 0,
            len: 4096,
        };
        let there = RemoteSpan {
            region: far.id(),
            offset: 0,
            len: 4096,
        };
        let read = || {
            pair.peer
                .read(&[span(near.id())], &[there], None, &RawOptions::default())
        };
        read().unwrap().wait(WAIT).unwrap();
        // Before its threads send, or after the last byte.
        replace(far.memory().address());
        moved_away(&read().unwrap().wait(WAIT).unwrap_err());
        replace(near.memory().address());
        moved_away(&read().unwrap_err());
        move_away(&pair.target);
        let pulled = pair
            .target
            .pull(export.reference(), table(&[1]), &PullOptions::default());
        moved_away(&pulled.unwrap_err());
        assert_eq!(export.state().as_str(), "active");
    }
}

#[test]
fn a_driver_that_fails_to_say_costs_the_claim_and_not_the_export() {
    if !is_here("moved::a_driver_that_fails_to_say_costs_the_claim_and_not_the_export") {
        return;
    }
    let pair = Pair::new(Way::cuda(Memory::Segments, Memory::Device));
    let export = pair.source.export(table(&[5, 6]), 8, b"", 1, LEASE).unwrap();
    let try_it = || {
        let pulled = pair
            .target
            .pull(export.reference(), table(&[1, 2]), &PullOptions::default())
            .unwrap();
        pulled.wait(WAIT).map(|()| pulled.state())
    };
    // One look beside the claim, whose failure says nothing, and one at the fence.
    fail(c"cuPointerGetAttribute", 1, 999);
    fail(c"cuPointerGetAttribute", 1, 999);
    let start = count("calls cuPointerGetAttribute");
    assert_eq!(try_it().unwrap_err().kind(), ErrorKind::Device);
    eventually("both looks", || count("calls cuPointerGetAttribute") - start >= 2);
    assert_eq!(try_it().unwrap(), TransferState::Done);
    came_over(&pair);
}

#[test]
fn a_claim_costs_one_look_at_each_allocation_however_many_blocks_it_names() {
    if !is_here("moved::a_claim_costs_one_look_at_each_allocation_however_many_blocks_it_names") {
        return;
    }
    let pair = Pair::new(Way::cuda(Memory::Segments, Memory::Device));
    let start = looks();
    pull(&pair, &PullOptions::default()).wait(WAIT).unwrap();
    // At the export, beside the claim, and at the fence.
    eventually("the looks of the first", || looks() - start >= 3);
    let blocks: Vec<u32> = (0..60).step_by(2).collect();
    let into: Vec<u32> = (0..30).collect();
    let export = pair.source.export(table(&blocks), 120, b"", 1, LEASE).unwrap();
    let before = looks();
    let pulled = pair
        .target
        .pull(export.reference(), table(&into), &PullOptions::default())
        .unwrap();
    pulled.wait(WAIT).unwrap();
    assert!(pulled.wait_quiesced(Some(Duration::from_secs(60))));
    // One allocation holds the cache: one look at the fence, and one beside the claim unless somebody was at it.
    assert!((1..=2).contains(&(looks() - before)), "{} looks", looks() - before);
}

#[test]
fn a_fence_that_is_repeated_is_looked_at_once() {
    if !is_here("moved::a_fence_that_is_repeated_is_looked_at_once") {
        return;
    }
    let owner = engine("owner", &[TransportKind::Tcp]);
    let cache = cache(&owner, Memory::Segments);
    let export = cache.export(table(&[5, 6]), 8, b"", 1, LEASE).unwrap();
    let before = looks();
    let mut wire = Wire::connect(owner.address().unwrap());
    wire.shake_hands();
    let transfer = TransferId(1);
    let asked = claim(1, export.reference(), cache.fingerprint());
    wire.send(&Message::Claim(Box::new(asked)));
    assert!(matches!(wire.receive(), Some(Message::Grant(_))));
    eventually("the look beside the claim", || looks() == before + 1);
    let done = wire::encode(&Message::Done(Done { transfer, bytes: 0 })).unwrap();
    wire.stream.write_all(&done.repeat(100)).unwrap();
    wire.send(&Message::Status(Status { transfer }));
    let mut answers = 0;
    loop {
        match wire.receive() {
            Some(Message::Ack(_)) => answers += 1,
            Some(Message::StatusReply(_)) if answers > 0 => break,
            Some(Message::StatusReply(_)) => wire.send(&Message::Status(Status { transfer })),
            other => panic!("{other:?}"),
        }
    }
    // One beside the claim, and one for the hundred; a repetition that comes just as the answer is given has one more.
    assert!((before + 2..before + 10).contains(&looks()), "{}", looks() - before);
}
