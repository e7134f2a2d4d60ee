//! Gather and scatter over real stream sockets: short writes, stops, ends.

mod common;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::noise;
use pdkv_core::ErrorKind;
use pdkv_device::limits::{stream_recv, stream_send};
use pdkv_device::{HostRegion, HugePages, IO_MAX_PIECES, IoBatch, configure_stream, recv_exact, send_exact};
use proptest::prelude::*;

const BYTES: u64 = 4 << 20;

fn pool() -> Arc<HostRegion> {
    HostRegion::allocate(BYTES, HugePages::Never).unwrap()
}

fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

/// Sends `blocks` scattered blocks with a header before each batch, receives them elsewhere, compares.
fn scattered(ours: &(impl AsFd + Sync), theirs: &(impl AsFd + Sync), block: u64) {
    let (src, dst) = (pool(), pool());
    src.write_at(0, &noise(1, BYTES)).unwrap();
    let blocks = BYTES / block;
    let stop = AtomicBool::new(false);
    let (from, to) = (|i: u64| i * 5 % blocks * block, |i: u64| i * 3 % blocks * block);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut batch = IoBatch::new();
            for i in 0..blocks {
                if batch.push(&src, from(i), block).unwrap() || i + 1 == blocks {
                    let header = batch.bytes().to_le_bytes();
                    let total = batch.bytes() + 8;
                    assert_eq!(batch.send_all(ours.as_fd(), &header, &stop).unwrap(), total);
                }
            }
        });
        let mut batch = IoBatch::new();
        for i in 0..blocks {
            if batch.push(&dst, to(i), block).unwrap() || i + 1 == blocks {
                let mut header = [0; 8];
                recv_exact(theirs.as_fd(), &mut header, &stop).unwrap();
                assert_eq!(u64::from_le_bytes(header), batch.bytes());
                batch.recv_all(theirs.as_fd(), &stop).unwrap();
            }
        }
    });
    let (source, mut got) = (noise(1, BYTES), vec![0; BYTES as usize]);
    dst.read_at(0, &mut got).unwrap();
    for i in 0..blocks {
        let (to, from) = (to(i) as usize, from(i) as usize);
        assert!(
            got[to..to + block as usize] == source[from..from + block as usize],
            "block {i}"
        );
    }
}

#[test]
fn blocks_cross_blocking_sockets() {
    let (ours, theirs) = tcp();
    for socket in [&ours, &theirs] {
        configure_stream(socket.as_fd(), Duration::from_millis(20)).unwrap();
    }
    scattered(&ours, &theirs, 1 << 12);
    let (ours, theirs) = UnixStream::pair().unwrap();
    for socket in [&ours, &theirs] {
        configure_stream(socket.as_fd(), Duration::from_millis(20)).unwrap();
    }
    scattered(&ours, &theirs, 1 << 8);
}

#[test]
fn blocks_cross_sockets_that_do_not_wait() {
    let (ours, theirs) = tcp();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    scattered(&ours, &theirs, 1 << 14);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn both_ends_may_cut_the_stream_differently(
        lens in proptest::collection::vec(1_u64..3000, 1..60), header in 0_usize..5000,
    ) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (src, dst) = (pool(), pool());
        src.write_at(0, &noise(9, BYTES)).unwrap();
        let stop = AtomicBool::new(false);
        let total: u64 = lens.iter().sum();
        let head = noise(4, header as u64);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut batch, mut at) = (IoBatch::new(), 0);
                for &len in &lens {
                    batch.push(&src, at, len).unwrap();
                    at += len + 1;
                }
                batch.send_all(ours.as_fd(), &head, &stop).unwrap();
            });
            let mut seen = vec![0; header];
            recv_exact(theirs.as_fd(), &mut seen, &stop).unwrap();
            assert!(seen == head);
            let mut batch = IoBatch::new();
            batch.push(&dst, 7, total / 3).unwrap();
            batch.push(&dst, 7 + total / 3, total - total / 3).unwrap();
            assert_eq!(batch.pieces(), 1);
            assert_eq!(batch.recv_all(theirs.as_fd(), &stop).unwrap(), total);
        });
        let (source, mut expected, mut at) = (noise(9, BYTES), Vec::new(), 0);
        for len in lens {
            expected.extend_from_slice(&source[at..at + len as usize]);
            at += len as usize + 1;
        }
        let mut got = vec![0; total as usize];
        dst.read_at(7, &mut got).unwrap();
        prop_assert!(got == expected);
    }
}

#[test]
fn a_stop_ends_both_directions_while_the_other_side_sleeps() {
    let (src, stop) = (pool(), AtomicBool::new(false));
    let (ours, theirs) = UnixStream::pair().unwrap();
    configure_stream(ours.as_fd(), Duration::from_millis(10)).unwrap();
    for sending in [true, false] {
        stop.store(false, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let mut batch = IoBatch::new();
                batch.push(&src, 0, BYTES).unwrap();
                if sending {
                    batch.send_all(ours.as_fd(), b"head", &stop)
                } else {
                    batch.recv_all(ours.as_fd(), &stop)
                }
            });
            std::thread::sleep(Duration::from_millis(30));
            stop.store(true, Ordering::Relaxed);
            let error = waiting.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TransferCancelled);
        });
    }
    drop(theirs);
}

#[test]
fn an_ended_stream_is_a_lost_peer() {
    let (region, stop) = (pool(), AtomicBool::new(false));
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&[5; 100]).unwrap();
    drop(theirs);
    let mut batch = IoBatch::new();
    batch.push(&region, 0, 200).unwrap();
    let error = batch.recv_all(ours.as_fd(), &stop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert!(error.message().contains("`100` of `200`"), "{error}");
    batch.push(&region, 0, 200).unwrap();
    assert_eq!(
        batch.send_all(ours.as_fd(), b"", &stop).unwrap_err().kind(),
        ErrorKind::PeerLost
    );
    assert_eq!(
        send_exact(ours.as_fd(), b"x", &stop).unwrap_err().kind(),
        ErrorKind::PeerLost
    );
    assert_eq!(
        recv_exact(ours.as_fd(), &mut [0], &stop).unwrap_err().kind(),
        ErrorKind::PeerLost
    );
}

#[test]
fn pushes_are_checked() {
    let region = pool();
    let mut batch = IoBatch::new();
    for (offset, len) in [(BYTES, 1), (0, BYTES + 1), (u64::MAX, 2)] {
        assert_eq!(batch.push(&region, offset, len).unwrap_err().kind(), ErrorKind::Region);
    }
    for piece in 0..IO_MAX_PIECES as u64 {
        assert_eq!(
            batch.push(&region, piece * 32, 16).unwrap(),
            piece + 1 == IO_MAX_PIECES as u64
        );
    }
    assert_eq!(
        batch.push(&region, BYTES / 2, 16).unwrap_err().kind(),
        ErrorKind::Capacity
    );
    assert!(
        batch.push(&region, (IO_MAX_PIECES as u64 - 1) * 32 + 16, 16).unwrap(),
        "a neighbour still fits"
    );
    let view = HostRegion::map_peer(region.shared().unwrap().fd.try_clone_to_owned().unwrap(), 4096, false).unwrap();
    let mut batch = batch.recycle();
    batch.push(&view, 0, 4096).unwrap();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let error = batch.recv_all(ours.as_fd(), &AtomicBool::new(false)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Region);
}

#[test]
fn the_limit_loops_move_the_same_bytes() {
    let (src, dst) = (pool(), pool());
    src.write_at(0, &noise(1, BYTES)).unwrap();
    let pairs = [tcp(), tcp()];
    let offsets: Vec<u64> = (0..BYTES / 512).map(|block| block * 512).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let streams: Vec<_> = pairs.iter().map(|pair| pair.0.as_fd()).collect();
            stream_send(&streams, &src, &offsets, 512).unwrap();
        });
        let streams: Vec<_> = pairs.iter().map(|pair| pair.1.as_fd()).collect();
        stream_recv(&streams, &dst, &offsets, 512).unwrap();
    });
    let mut got = vec![0; BYTES as usize];
    dst.read_at(0, &mut got).unwrap();
    assert!(got == noise(1, BYTES));
    assert_eq!(
        stream_send(&[], &src, &offsets, 512).unwrap_err().kind(),
        ErrorKind::Config
    );
}
