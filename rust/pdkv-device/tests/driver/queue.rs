//! Posting: what it copies, what it asks of the driver, and that it neither waits nor allocates.

use pdkv_core::ErrorKind;
use pdkv_device::cuda::{CopyQueue, Stream, Ticket};
use pdkv_device::kernels::{Jobs, PageTables, Wishes};

use crate::allocations::allocations;
use crate::alone::Alone;
use crate::caches::{Pair, Wish};
use crate::standin::{asked_again, calls, fail, hold, reset};

/// Posts the jobs of a pair that lives until the queue was waited for.
fn post(queue: &mut CopyQueue, pair: &Pair, wishes: Wishes) -> Option<Ticket> {
    // SAFETY: every test here waits for the stream before the pair is dropped, and uses its buffers in the order of streams.
    unsafe { queue.post(&pair.jobs, wishes) }.unwrap()
}

fn check_all(pairs: &[Pair], stream: &Stream) {
    for pair in pairs {
        pair.check(stream);
    }
}

#[test]
fn a_post_copies_and_sums_up() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    for (same, content, bulk) in [
        (true, 512, None),
        (true, 512, Some(0)),
        (false, 512, Some(0)),
        (false, 6, None),
    ] {
        let wish = Wish {
            same,
            ..Wish::new(2, content)
        };
        let pair = Pair::new(&context, &stream, &wish);
        let wishes = Wishes {
            sums: true,
            bulk,
            most_blocks: None,
        };
        for _ in 0..2 {
            pair.reset(&stream);
            stream.synchronize().unwrap();
            let ticket = post(&mut queue, &pair, wishes).unwrap();
            assert!(!queue.passed(ticket).unwrap(), "nothing has run yet");
            stream.synchronize().unwrap();
            assert!(queue.passed(ticket).unwrap());
            assert_eq!(queue.under_way(), 0);
            assert_eq!(queue.take_sums(ticket), Some(pair.sums.clone()));
            assert_eq!(queue.take_sums(ticket), None);
            pair.check(&stream);
        }
    }
    drop((queue, stream, context));
    alone.nothing_is_left();
}

#[test]
fn a_verified_post_sums_up_what_it_read_and_what_it_placed() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    // The same order on both sides, heads before tokens on one of them, and pieces that fit no vector.
    for (layers, same, content) in [(2, true, 512), (2, false, 512), (1, false, 6), (80, false, 64)] {
        let wish = Wish {
            same,
            ..Wish::new(layers, content)
        };
        let pair = Pair::new(&context, &stream, &wish);
        // The lanes come with the first and lie there for the second.
        for wrong in [false, true] {
            pair.reset(&stream);
            stream.synchronize().unwrap();
            if wrong {
                fail(alone.path, c"wrong", 1, 1);
            }
            // SAFETY: all buffers live until the stream is waited for, and nothing else uses them.
            let ticket = unsafe { queue.post_verified(&pair.jobs, Wishes::default()) }
                .unwrap()
                .unwrap();
            queue.wait(ticket).unwrap();
            let sums = queue.take_sums(ticket).unwrap();
            let (read, placed) = sums.split_at(pair.sums.len());
            assert_eq!(read, pair.sums);
            let differing = read.iter().zip(placed).filter(|(read, placed)| read != placed).count();
            assert_eq!((placed.len(), differing), (read.len(), usize::from(wrong)));
            if !wrong {
                pair.check(&stream);
            }
        }
    }
    drop((queue, stream, context));
    alone.nothing_is_left();
}

#[test]
fn what_a_post_asks_of_the_driver_does_not_grow_with_the_layers() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    let mut asked = Vec::new();
    for layers in [1, 80] {
        let pair = Pair::new(&context, &stream, &Wish::new(layers, 64));
        let mut counted = || {
            let before = calls(alone.path);
            let ticket = post(&mut queue, &pair, Wishes::default()).unwrap();
            let mut after = calls(alone.path);
            after.retain(|name, count| {
                *count -= before.get(name).unwrap_or(&0);
                *count > 0
            });
            stream.synchronize().unwrap();
            assert!(queue.passed(ticket).unwrap());
            after
        };
        let first = counted();
        assert_eq!(first["cuMemcpyAsync"], 2, "lanes, which stay, and tables");
        let second = counted();
        assert_eq!(second, counted());
        asked.push(second);
        pair.check(&stream);
    }
    let one: Vec<_> = asked[0].iter().map(|(name, count)| (name.as_str(), *count)).collect();
    assert_eq!(
        one,
        [
            ("cuCtxPopCurrent_v2", 2),
            ("cuCtxPushCurrent_v2", 2),
            ("cuEventRecord", 1),
            ("cuLaunchKernel", 1),
            ("cuMemcpyAsync", 1),
            ("cuThreadExchangeStreamCaptureMode", 4),
        ]
    );
    assert_eq!(asked[0], asked[1]);
}

#[test]
fn a_warm_queue_allocates_nothing() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    let pairs = [1, 3].map(|layers| Pair::new(&context, &stream, &Wish::new(layers, 64)));
    let mut round = || {
        let tickets = [0, 1].map(|number: usize| post(&mut queue, &pairs[number], Wishes::default()).unwrap());
        stream.synchronize().unwrap();
        assert!(tickets.iter().all(|&ticket| queue.passed(ticket).unwrap()));
    };
    round();
    let before = allocations();
    round();
    assert_eq!(allocations(), before);
    check_all(&pairs, &stream);
}

#[test]
fn a_full_ring_is_said_and_larger_tables_get_a_larger_one() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    let before = queue.memory_bytes();
    // Two tables of 4 bytes an entry: 0.8 MB and 1.6 MB, with a ring of 1 MiB.
    let wish = |blocks: u32| Wish {
        blocks: ((0..blocks).rev().collect(), (0..blocks).map(|id| id ^ 1).collect()),
        ..Wish::new(1, 1)
    };
    let (large, larger) = (
        Pair::new(&context, &stream, &wish(100_000)),
        Pair::new(&context, &stream, &wish(200_000)),
    );
    for pair in [&large, &larger] {
        pair.reset(&stream);
    }
    stream.synchronize().unwrap();
    let first = post(&mut queue, &large, Wishes::default()).unwrap();
    assert!(post(&mut queue, &large, Wishes::default()).is_none());
    assert!(
        post(&mut queue, &larger, Wishes::default()).is_none(),
        "not while tables are under way"
    );
    assert_eq!(queue.under_way(), 1);
    stream.synchronize().unwrap();
    let second = post(&mut queue, &larger, Wishes::default()).unwrap();
    assert!(queue.passed(first).unwrap() && !queue.passed(second).unwrap());
    assert!(queue.memory_bytes() > before);
    // Half of what is taken of the new ring.
    let third = post(&mut queue, &large, Wishes::default());
    assert!(third.is_none());
    stream.synchronize().unwrap();
    assert!(queue.passed(second).unwrap());
    post(&mut queue, &large, Wishes::default()).unwrap();
    stream.synchronize().unwrap();
    larger.check(&stream);
    large.check(&stream);
    drop((large, larger, queue, stream, context));
    alone.nothing_is_left();
}

#[test]
fn lanes_of_many_caches_come_and_go() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    // 1,000 layers are 2,000 lanes or 64 KB, of which 16 have room.
    let pairs: Vec<_> = (0..20)
        .map(|_| Pair::new(&context, &stream, &Wish::new(1000, 1)))
        .collect();
    for _ in 0..2 {
        for pair in &pairs {
            pair.reset(&stream);
        }
        stream.synchronize().unwrap();
        // Several under way at a time, so that lanes are overwritten behind launches that read them.
        for some in pairs.chunks(6) {
            for pair in some {
                post(&mut queue, pair, Wishes::default()).unwrap();
            }
            stream.synchronize().unwrap();
        }
        check_all(&pairs, &stream);
    }
}

#[test]
fn what_cannot_be_posted_leaves_nothing() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    let mut pair = Pair::new(&context, &stream, &Wish::new(2, 64));
    let tables = std::mem::replace(
        &mut pair.jobs.tables,
        PageTables {
            src: Some(vec![1]),
            dst: None,
        },
    );
    // SAFETY: nothing is posted.
    let error = unsafe { queue.post(&pair.jobs, Wishes::default()) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Layout);
    pair.jobs.tables = tables;
    pair.jobs.list[0].shape.axes[0].count = 0;
    // SAFETY: nothing is posted.
    let error = unsafe { queue.post(&pair.jobs, Wishes::default()) }.unwrap_err();
    assert_eq!((error.kind(), queue.under_way()), (ErrorKind::Layout, 0));
    // Nothing to copy is a post like any other.
    // SAFETY: there is nothing to copy.
    let ticket = unsafe { queue.post(&Jobs::default(), Wishes::default()) }
        .unwrap()
        .unwrap();
    stream.synchronize().unwrap();
    assert!(queue.passed(ticket).unwrap());
}

#[test]
fn a_queue_that_goes_waits_for_what_is_under_way() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    let pair = Pair::new(&context, &stream, &Wish::new(2, 64));
    pair.reset(&stream);
    stream.synchronize().unwrap();
    let ticket = post(&mut queue, &pair, Wishes::default()).unwrap();
    assert!(!queue.passed(ticket).unwrap());
    drop(queue);
    pair.check(&stream);
    drop((pair, stream, context));
    alone.nothing_is_left();
}

#[test]
fn a_driver_that_does_not_tell_has_not_said_that_a_post_passed() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    let pair = Pair::new(&context, &stream, &Wish::new(2, 64));
    // As while somebody captures a graph: the call fails, the copy goes on.
    for (call, name) in [(c"cuEventQuery", "a look"), (c"cuEventRecord", "no event")] {
        pair.reset(&stream);
        hold(alone.path, 1);
        fail(alone.path, call, 1, 900);
        let ticket = post(&mut queue, &pair, Wishes::default()).unwrap();
        assert!(!queue.passed(ticket).unwrap(), "{name}");
        assert!(!queue.passed(ticket).unwrap(), "{name}");
        // Nor by anything else that is not the end of the context, however often.
        for status in [304, 1, 201, 900] {
            for look in [c"cuEventQuery", c"cuStreamQuery"] {
                fail(alone.path, look, 0, status);
            }
            asked_again(alone.path, 5, || {
                assert!(!queue.passed(ticket).unwrap() && !queue.is_broken(), "{name}, {status}");
            });
            reset(alone.path);
        }
        hold(alone.path, 0);
        fail(alone.path, c"cuStreamSynchronize", 1, 900);
        queue.wait(ticket).unwrap();
        reset(alone.path);
        pair.check(&stream);
    }
    // Nor does a queue that goes let its tables go before it knows.
    pair.reset(&stream);
    post(&mut queue, &pair, Wishes::default()).unwrap();
    fail(alone.path, c"cuStreamSynchronize", 1, 900);
    drop(queue);
    reset(alone.path);
    pair.check(&stream);
    drop((pair, stream, context));
    alone.nothing_is_left();
}

#[test]
fn a_post_that_failed_is_told_when_it_is_over_and_a_dead_context_at_once() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    let pair = Pair::new(&context, &stream, &Wish::new(2, 64));
    // The tables are on their way when the launch is refused.
    hold(alone.path, 1);
    fail(alone.path, c"cuLaunchKernel", 1, 1);
    let ticket = post(&mut queue, &pair, Wishes::default()).unwrap();
    assert!(!queue.passed(ticket).unwrap());
    hold(alone.path, 0);
    let error = queue.wait(ticket).unwrap_err();
    assert!(error.message().contains("`cuLaunchKernel` returned `1`"), "{error}");
    assert!(queue.passed(ticket).unwrap(), "it is said once");
    // What was not brought is not known: the same lanes go up again.
    let ticket = post(&mut queue, &pair, Wishes::default()).unwrap();
    queue.wait(ticket).unwrap();
    pair.check(&stream);
    fail(alone.path, c"run", 1, 719);
    let ticket = post(&mut queue, &pair, Wishes::default()).unwrap();
    for _ in 0..2 {
        let error = queue.wait(ticket).unwrap_err();
        assert!(error.message().contains("returned `719`"), "{error}");
    }
    // SAFETY: nothing is posted.
    let error = unsafe { queue.post(&pair.jobs, Wishes::default()) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    assert!(queue.is_broken() && queue.is_settled());
    // A dead context stays dead: nothing that was asked in it may run when the stand-in is made whole again.
    drop((pair, queue, stream, context));
    reset(alone.path);
}
