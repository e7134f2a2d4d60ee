//! The word by which a post says that it is over: after its bytes, without the driver, and not the only way to learn of an end.

use std::time::Duration;

use pdkv_core::ErrorKind;
use pdkv_core::plan::Plan;
use pdkv_core::span::Span;
use pdkv_device::cuda::{CopyQueue, DeviceBuffer, Stream, Ticket};
use pdkv_device::kernels::{Jobs, Run, Wishes};

use crate::alone::Alone;
use crate::caches::{Pair, Wish};
use crate::standin::{Eager, Held, calls, fail, reset};

const SUMS: Wishes = Wishes {
    sums: true,
    bulk: None,
    most_blocks: None,
};

fn post(queue: &mut CopyQueue, jobs: &Jobs, wishes: Wishes) -> Ticket {
    // SAFETY: every test here sees the post pass before its memory goes, and looks at that in the order of streams or after the flag.
    unsafe { queue.post(jobs, wishes) }.unwrap().unwrap()
}

/// Until a post has passed, by looks that may be as many as they like.
fn see(queue: &mut CopyQueue, ticket: Ticket) {
    while !queue.passed(ticket).unwrap() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn whoever_sees_the_flag_sees_the_bytes_and_the_sums() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    // What this one is asked waits for nothing that the queue does.
    let beside = Stream::new(&context).unwrap();
    for (same, content, wishes) in [
        (true, 512, Wishes::default()),
        (true, 512, Wishes { bulk: Some(0), ..SUMS }),
        (false, 512, SUMS),
        (false, 6, Wishes::default()),
    ] {
        let wish = Wish {
            same,
            ..Wish::new(2, content)
        };
        let pair = Pair::new(&context, &beside, &wish);
        pair.reset(&beside);
        let ticket = post(&mut queue, &pair.jobs, wishes);
        assert_eq!(queue.flag() + 1, ticket.flag(), "nothing has run yet");
        while queue.flag() < ticket.flag() {
            // One step of it.
            assert!(!stream.done().unwrap());
        }
        pair.check(&beside);
        assert!(queue.passed(ticket).unwrap());
        assert_eq!(queue.take_sums(ticket), wishes.sums.then(|| pair.sums.clone()));
    }
    drop((queue, stream, beside, context));
    alone.nothing_is_left();
}

#[test]
fn of_several_launches_the_last_one_raises_it() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    let beside = Stream::new(&context).unwrap();
    let [from, to] = [0, 1].map(|_| DeviceBuffer::new(&context, 64).unwrap());
    let bytes: Vec<u8> = (0..64).collect();
    from.write(&beside, 0, &bytes).unwrap();
    to.fill(&beside, 0xFF).unwrap();
    beside.synchronize().unwrap();
    // Wide vectors for the first, narrow ones for the others.
    let spans = [(0, 16), (20, 4), (25, 3)].map(|(offset, len)| Span::new(0, offset, len));
    let plan = Plan::spans(&spans, &[64], &spans, &[64]).unwrap();
    let jobs = Jobs::of(&plan, &[from.address()], &[to.address()]).unwrap();
    let launches = || calls(alone.path)["cuLaunchKernel"];
    let before = launches();
    let ticket = post(&mut queue, &jobs, Wishes::default());
    assert!(launches() - before > 1);
    while queue.flag() < ticket.flag() {
        assert!(!stream.done().unwrap());
    }
    let mut found = vec![0; 64];
    to.read(&beside, 0, &mut found).unwrap();
    let mut expected = vec![0xFF; 64];
    for at in [0..16, 20..24, 25..28] {
        expected[at.clone()].copy_from_slice(&bytes[at]);
    }
    assert_eq!(found, expected);
    assert!(queue.passed(ticket).unwrap());
}

#[test]
fn posts_that_tell_their_ends_ask_the_driver_nothing() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    let pair = Pair::new(&context, &stream, &Wish::new(2, 64));
    let [from, to] = [0, 1].map(|_| DeviceBuffer::new(&context, 64).unwrap());
    let run = Run {
        src: from.address(),
        dst: to.address(),
        bytes: 64,
    };
    let _eager = Eager::new(alone.path);
    for round in 0..8 {
        let tickets = [
            post(&mut queue, &pair.jobs, Wishes::default()),
            post(&mut queue, &pair.jobs, SUMS),
            post(&mut queue, &Jobs::default(), Wishes::default()),
            // SAFETY: both buffers live until the stream is waited for.
            unsafe { queue.post_batch(&[run]) }.unwrap(),
        ];
        let asked = calls(alone.path);
        for ticket in tickets {
            assert!(queue.passed(ticket).unwrap(), "round {round}");
            queue.wait(ticket).unwrap();
        }
        assert_eq!(calls(alone.path), asked, "round {round}");
        assert_eq!(queue.take_sums(tickets[1]), Some(pair.sums.clone()));
    }
    pair.check(&stream);
}

#[test]
fn a_flag_that_never_comes_is_not_waited_for() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    let pair = Pair::new(&context, &stream, &Wish::new(2, 64));
    for by_wait in [false, true] {
        pair.reset(&stream);
        fail(alone.path, c"flag", 1, 1);
        let ticket = post(&mut queue, &pair.jobs, Wishes::default());
        if by_wait {
            queue.wait(ticket).unwrap();
        } else {
            see(&mut queue, ticket);
        }
        assert!(queue.flag() < ticket.flag());
        pair.check(&stream);
    }
    // The next one speaks for those before it.
    fail(alone.path, c"flag", 1, 1);
    let silent = post(&mut queue, &pair.jobs, Wishes::default());
    let ticket = post(&mut queue, &pair.jobs, Wishes::default());
    stream.synchronize().unwrap();
    let asked = calls(alone.path);
    assert!(queue.passed(silent).unwrap() && queue.passed(ticket).unwrap());
    assert_eq!(calls(alone.path), asked);
    drop((pair, queue, stream, context));
    alone.nothing_is_left();
}

#[test]
fn a_driver_that_writes_no_words_is_asked_for_none_twice_and_after_events() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    let pair = Pair::new(&context, &stream, &Wish::new(2, 64));
    let written = || calls(alone.path).get("cuStreamWriteValue64_v2").copied().unwrap_or(0);
    let before = written();
    fail(alone.path, c"cuStreamWriteValue64_v2", 0, 801);
    for _ in 0..2 {
        let ticket = post(&mut queue, &pair.jobs, SUMS);
        see(&mut queue, ticket);
        assert!(queue.flag() < ticket.flag());
        assert_eq!(queue.take_sums(ticket), Some(pair.sums.clone()));
    }
    assert_eq!(written() - before, 1);
    // A launch needs no such driver.
    let ticket = post(&mut queue, &pair.jobs, Wishes::default());
    stream.synchronize().unwrap();
    assert_eq!(queue.flag(), ticket.flag());
    assert!(queue.passed(ticket).unwrap());
    reset(alone.path);
}

#[test]
fn a_context_that_dies_raises_no_flag_and_is_found_out() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let (context, mut queue, stream) = alone.queue();
    let pair = Pair::new(&context, &stream, &Wish::new(2, 64));
    let over = post(&mut queue, &pair.jobs, Wishes::default());
    queue.wait(over).unwrap();
    let held = Held::new(alone.path);
    let tickets = [(); 3].map(|()| post(&mut queue, &pair.jobs, Wishes::default()));
    drop(held);
    fail(alone.path, c"run", 1, 719);
    let error = loop {
        match queue.passed(tickets[0]) {
            Ok(passed) => assert!(!passed, "a copy that never ran"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Device);
    assert!(error.message().contains("returned `719`"), "{error}");
    for ticket in tickets {
        assert_eq!(queue.wait(ticket).unwrap_err().kind(), ErrorKind::Device);
    }
    assert_eq!(queue.flag(), over.flag());
    assert!(queue.is_broken());
    drop((pair, queue, stream, context));
    reset(alone.path);
}
