//! A second process that dies, stops, or takes its memory away, over every copy and lane.

#![allow(clippy::print_stdout, reason = "a test says what it skipped and what it found")]

mod common;

use std::time::{Duration, Instant};

use common::cases::{lane, over, over_all};
use common::processes::{FAR_SEED, ID, ONE_PIECE, Side, ask, far_bytes, hide, serve, start};
use common::{PATIENCE, bytes, pattern};
use pdkv_core::{ErrorKind, Scope};
use pdkv_ucx::{Delivery, Direction, ErrorMode, Link, Span, Tally};

#[test]
fn far_side() {
    serve();
}

/// Puts 64 spans and flushes, counted apart; goes on until that is over, as far as `ends` says that it must end.
fn put_and_flush(side: &Side, ends: Ends) -> (Tally, Tally) {
    let (puts, flush) = (Tally::new(side.worker()), Tally::new(side.worker()));
    let spans: Vec<Span> = (0..64)
        .map(|at| Span {
            local_offset: at * 4096,
            remote_offset: at * 4096,
            len: 4096,
        })
        .collect();
    let posted = side
        .endpoint()
        .post(Direction::Put, &side.memory, side.key(), &spans, &puts);
    let flushed = side.endpoint().flush(&flush);
    println!("note: posted {posted:?}, flushed {flushed:?}");
    match ends {
        Ends::All => side.until("the puts and the flush", || {
            puts.outstanding() + flush.outstanding() == 0
        }),
        Ends::Puts => side.wait(&puts),
        Ends::Perhaps => {}
    }
    let until = Instant::now() + Duration::from_secs(2);
    while puts.outstanding() + flush.outstanding() > 0 && Instant::now() < until {
        side.worker().progress();
    }
    (puts, flush)
}

/// What must come to its end.
#[derive(Clone, Copy)]
enum Ends {
    All,
    Puts,
    /// With nobody at the other end, nothing need.
    Perhaps,
}

#[test]
fn a_dead_peers_puts_never_count_as_done() {
    over_all("case_a_dead_peers_puts");
}

#[test]
fn case_a_dead_peers_puts() {
    let Some(tls) = lane() else { return };
    let (mut side, mut far) = start(ErrorMode::None);
    let by_kernel = copies_by_kernel(&side);
    let (puts, flush) = put_and_flush(&side, Ends::All);
    assert!(puts.failure().is_none() && flush.failure().is_none() && puts.outstanding() == 0);
    far.0.kill().unwrap();
    far.0.wait().unwrap();
    let (puts, flush) = put_and_flush(&side, Ends::Perhaps);
    println!(
        "note: puts {:?}, {} under way; flush {:?}",
        puts.failure(),
        puts.outstanding(),
        flush.failure()
    );
    assert!(puts.failed() + flush.failed() + puts.outstanding() + flush.outstanding() > 0);
    if tls.contains("cma") && by_kernel {
        assert!(puts.failed() > 0, "the kernel says at once that nobody is there");
    }
    if let Some(error) = puts.failure() {
        assert_eq!((error.kind(), error.scope()), (ErrorKind::PeerLost, Scope::Endpoint));
    }
    side.disconnect();
    assert_eq!(puts.outstanding() + flush.outstanding(), 0);
    assert!(puts.failure().is_some() || flush.failure().is_some());
}

/// Whether UCX itself says that the kernel does the copy.
fn copies_by_kernel(side: &Side) -> bool {
    let tally = Tally::new(side.worker());
    let probe = side
        .endpoint()
        .probe_put(&side.memory, 0, side.key(), 0, 64, &tally)
        .unwrap();
    side.wait(&tally);
    probe.certain
        && probe
            .transports
            .iter()
            .all(|resource| resource.link() == Link::KernelCopy)
}

#[test]
fn memory_that_the_kernel_finds_gone_fails_the_put_and_not_the_flush() {
    over("case_memory_gone", &["posix,cma", "sysv,cma"]);
}

#[test]
fn case_memory_gone() {
    if lane().is_none() {
        return;
    }
    let (mut side, _far) = start(ErrorMode::None);
    if !copies_by_kernel(&side) {
        println!("note: skipped: this copy doesn't say that the kernel copies, and otherwise the peer would die of it");
        return;
    }
    assert_eq!(ask(&mut side, b"u"), b"gone");
    let (puts, flush) = put_and_flush(&side, Ends::Puts);
    println!(
        "note: puts {:?}; flush {:?}, {} under way",
        puts.failure(),
        flush.failure(),
        flush.outstanding()
    );
    assert!(puts.failed() > 0, "no put into memory that is gone counts as done");
    assert_eq!(ask(&mut side, b"f").len(), 24, "the peer is unharmed");
}

#[test]
fn a_message_that_the_kernel_cannot_fetch_counts_as_done_at_neither_end() {
    over("case_a_message_that_cannot_be_fetched", &["posix,cma", "sysv,cma"]);
}

/// Only a message of one piece is fetched by the kernel.
#[test]
fn case_a_message_that_cannot_be_fetched() {
    if lane().is_none() {
        return;
    }
    let len: u64 = 1 << 20;
    let (mut side, _far) = start(ErrorMode::None);
    let mut command = vec![b'm'];
    command.extend(ONE_PIECE.to_le_bytes());
    command.extend(len.to_le_bytes());
    command.push(1);
    ask(&mut side, &command);
    let mut incoming = None;
    side.until("the far side's message", || {
        incoming = side.inbox.as_ref().unwrap().pop();
        incoming.is_some()
    });
    assert_eq!(ask(&mut side, b"h"), b"hidden");
    let received = Tally::new(side.worker());
    incoming.unwrap().receive(&[side.piece(0, len)], &received).unwrap();
    side.wait(&received);
    let error = received.failure().expect("nothing was there to be received");
    assert_eq!((error.kind(), error.scope()), (ErrorKind::PeerLost, Scope::Endpoint));
    let [done, _] = messages_of(&mut side);
    assert_eq!(done, 0, "its sender takes it for sent");

    // The other way round. UCX tells the sender nothing, so that its worker's end must do.
    let (mut side, _far) = start(ErrorMode::None);
    hide(&side.memory);
    let sent = Tally::new(side.worker());
    let (header, piece) = (ONE_PIECE.to_le_bytes(), side.piece(0, len));
    side.endpoint()
        .send_message(ID, &header, &[piece], Delivery::Rendezvous, &sent)
        .unwrap();
    let started = Instant::now();
    while messages_of(&mut side) == [0, 0] {
        assert!(started.elapsed() < PATIENCE, "the far side never received");
    }
    assert_eq!(messages_of(&mut side), [0, 1], "its receiver takes it for received");
    side.disconnect();
    assert!(sent.outstanding() == 0 && sent.failure().is_some(), "it was never sent");
}

/// How many messages are over for the far side, without and with a failure.
fn messages_of(side: &mut Side) -> [u64; 2] {
    let answer = ask(side, b"s");
    [0, 8].map(|at| u64::from_le_bytes(answer[at..at + 8].try_into().unwrap()))
}

#[test]
fn a_stopped_peer_goes_on_where_it_was() {
    over_all("case_a_stopped_peer");
}

#[test]
fn case_a_stopped_peer() {
    if lane().is_none() {
        return;
    }
    let (mut side, far) = start(ErrorMode::None);
    far.signal("STOP");
    let tally = Tally::new(side.worker());
    let spans: Vec<Span> = (0..16)
        .map(|at| Span {
            local_offset: at << 16,
            remote_offset: at << 16,
            len: 1 << 16,
        })
        .collect();
    side.endpoint()
        .post(Direction::Put, &side.memory, side.key(), &spans, &tally)
        .unwrap();
    side.endpoint().flush(&tally).unwrap();
    side.endpoint()
        .get(&side.memory, 1 << 20, side.key(), 1 << 20, 1 << 20, &tally)
        .unwrap();
    let until = Instant::now() + Duration::from_millis(200);
    while Instant::now() < until {
        side.worker().progress();
    }
    far.signal("CONT");
    side.wait(&tally);
    assert!(tally.failure().is_none(), "{:?}", tally.failure());
    assert!(far_bytes(&mut side, 0, 1 << 20) == pattern(4 << 20, 1)[..1 << 20]);
    assert!(bytes(&side.memory, 1 << 20, 1 << 20) == pattern(4 << 20, FAR_SEED)[1 << 20..2 << 20]);
}

#[test]
fn an_endpoint_that_watches_says_that_its_peer_died() {
    over("case_an_endpoint_that_watches", &["tcp"]);
}

#[test]
fn case_an_endpoint_that_watches() {
    if lane().is_none() {
        return;
    }
    for idle in [true, false] {
        let (mut side, far) = start(ErrorMode::Peer);
        let (tally, sent) = (Tally::new(side.worker()), Tally::new(side.worker()));
        let spans: Vec<Span> = (0..16)
            .map(|at| Span {
                local_offset: at << 16,
                remote_offset: at << 16,
                len: 1 << 16,
            })
            .collect();
        if idle {
            far.signal("KILL");
        } else {
            far.signal("STOP");
            side.endpoint()
                .post(Direction::Put, &side.memory, side.key(), &spans, &tally)
                .unwrap();
            side.endpoint().flush(&tally).unwrap();
            let (header, pieces) = (0_u64.to_le_bytes(), [side.piece(0, 1 << 20)]);
            side.endpoint()
                .send_message(ID, &header, &pieces, Delivery::Rendezvous, &sent)
                .unwrap();
            far.signal("KILL");
        }
        side.until("the failure", || side.endpoint().failure().is_some());
        let error = side.endpoint().failure().unwrap();
        assert_eq!((error.kind(), error.scope()), (ErrorKind::PeerLost, Scope::Endpoint));
        side.wait(&tally);
        assert_eq!(tally.failed() > 0, !idle);
        side.wait(&sent);
        assert_eq!(sent.failed(), u64::from(!idle), "nobody has fetched the message");
        side.disconnect();
    }
}
