//! Two workers in one thread over every copy and lane: bytes, counts, bounds and lifetimes.

#![allow(clippy::print_stdout, reason = "a test says what it skipped and what it found")]

mod common;

use common::{LANES, Pair, bytes, lanes, library, memory, pattern};
use pdkv_core::ErrorKind;
use pdkv_ucx::{Delivery, Direction, ErrorMode, InboxLimits, MemoryHandle, Piece, PieceMemory, Span, Tally};

#[test]
fn puts_and_gets_arrive() {
    let Some(library) = library() else { return };
    for tls in LANES {
        let pair = Pair::new(&library, &lanes(tls), ErrorMode::None);
        let (local, remote) = (memory(&pair.context, 1 << 20, 1), memory(&pair.context, 1 << 20, 2));
        let key = pair.key(&remote);
        let tally = Tally::new(&pair.near);
        let spans: Vec<Span> = (0..16)
            .map(|at| Span {
                local_offset: at * 8192,
                remote_offset: (15 - at) * 8192 + 100,
                len: 4096 + at,
            })
            .collect();
        pair.to_far.post(Direction::Put, &local, &key, &spans, &tally).unwrap();
        pair.to_far.flush(&tally).unwrap();
        pair.wait(&tally);
        assert!(tally.failure().is_none(), "{tls}: {:?}", tally.failure());
        for span in &spans {
            assert_eq!(
                bytes(&remote, span.remote_offset, span.len),
                bytes(&local, span.local_offset, span.len),
                "{tls}"
            );
        }
        pair.to_far
            .get(&local, 512 << 10, &key, 512 << 10, 100_000, &tally)
            .unwrap();
        pair.wait(&tally);
        assert!(tally.failure().is_none(), "{tls}");
        let theirs = &pattern(1 << 20, 2)[512 << 10..][..100_000];
        assert_eq!(bytes(&local, 512 << 10, 100_000), theirs, "{tls}");
        println!("{tls}: {:?}", pair.to_far.resources());
        for len in [64, 100_000] {
            let probe = pair.to_far.probe_put(&local, 0, &key, 0, len, &tally);
            pair.wait(&tally);
            println!("{tls} {len}: {probe:?}");
        }
    }
}

#[test]
fn messages_scatter() {
    let Some(library) = library() else { return };
    for tls in LANES {
        let pair = Pair::new(&library, &lanes(tls), ErrorMode::None);
        let inbox = pair.far.receive_messages(7, InboxLimits::default()).unwrap();
        let (from, to) = (memory(&pair.context, 4 << 20, 1), memory(&pair.context, 4 << 20, 2));
        for (delivery, piece) in [
            (Delivery::Eager, 1000),
            (Delivery::Eager, 65536),
            (Delivery::Rendezvous, 1000),
            (Delivery::Rendezvous, 65536),
        ] {
            let piece_at = |memory: &std::sync::Arc<MemoryHandle>, at: u64| Piece {
                memory: PieceMemory::Mapped(std::sync::Arc::clone(memory)),
                offset: at * 100_000,
                len: piece,
            };
            let out: Vec<Piece> = (0..16).map(|at| piece_at(&from, at)).collect();
            let into: Vec<Piece> = (0..16).rev().map(|at| piece_at(&to, at)).collect();
            let (sent, received) = (Tally::new(&pair.near), Tally::new(&pair.far));
            pair.to_far.send_message(7, b"header", &out, delivery, &sent).unwrap();
            let mut incoming = None;
            pair.until("the message", || {
                incoming = inbox.pop();
                incoming.is_some()
            });
            let incoming = incoming.unwrap();
            assert_eq!(
                (incoming.header.as_slice(), incoming.len()),
                (b"header".as_slice(), 16 * piece)
            );
            assert_eq!(
                incoming.staged(),
                delivery == Delivery::Eager,
                "{tls} {delivery:?} {piece}"
            );
            incoming.receive(&into, &received).unwrap();
            pair.wait(&received);
            pair.wait(&sent);
            assert!(
                sent.failure().is_none() && received.failure().is_none(),
                "{tls} {delivery:?} {:?} {:?}",
                sent.failure(),
                received.failure()
            );
            for (out, into) in out.iter().zip(&into) {
                assert_eq!(
                    bytes(&to, into.offset, piece),
                    bytes(&from, out.offset, piece),
                    "{tls} {delivery:?}"
                );
            }
        }
        assert!(inbox.pop().is_none());
    }
}

#[test]
fn bounds_are_checked_before_anything_is_posted() {
    let Some(library) = library() else { return };
    let pair = Pair::new(&library, &lanes("tcp"), ErrorMode::None);
    let (local, remote) = (memory(&pair.context, 8192, 1), memory(&pair.context, 4096, 2));
    let key = pair.key(&remote);
    let tally = Tally::new(&pair.near);
    for (local_offset, remote_offset, len) in [
        (0, 0, 4097),
        (0, 4096, 1),
        (8192, 0, 1),
        (u64::MAX, 0, 2),
        (0, u64::MAX, 2),
    ] {
        let refused = pair
            .to_far
            .put(&local, local_offset, &key, remote_offset, len, &tally)
            .unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Region);
    }
    assert_eq!((tally.outstanding(), tally.failed()), (0, 0));
}
