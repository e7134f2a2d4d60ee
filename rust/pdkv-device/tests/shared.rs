//! Pools and descriptors between two real processes, and what a peer's memfd must be.

mod common;

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use common::{Other, noise, tell, word};
use pdkv_core::ErrorKind;
use pdkv_device::{HostRegion, HugePages, recv_fds, send_fds};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

const BYTES: u64 = 3 << 20;

static NEVER: AtomicBool = AtomicBool::new(false);

/// In the other process: maps what it is sent, checks it, writes into it, says so, and leaves.
#[test]
fn the_other_process() {
    let Some(mut socket) = common::parent() else { return };
    let mut bytes = [0; 8];
    let (_, mut fds) = recv_fds(socket.as_fd(), &mut bytes, 1).unwrap().unwrap();
    let region = HostRegion::map_peer(fds.pop().unwrap(), u64::from_le_bytes(bytes), true).unwrap();
    let mut seen = vec![0; region.len() as usize];
    region.read_at(0, &mut seen).unwrap();
    tell(&mut socket, u64::from(seen == noise(1, region.len())));
    region.write_at(70_000, &noise(2, 5000)).unwrap();
    tell(&mut socket, 1);
    word(&mut socket);
}

fn with_a_peer(huge: HugePages) {
    let pool = HostRegion::allocate(BYTES - 5, huge).unwrap();
    pool.write_at(0, &noise(1, BYTES - 5)).unwrap();
    let shared = pool.shared().unwrap();
    assert_eq!((shared.region_offset, shared.fd_len), (0, BYTES - 5));
    let mut other = Other::start("the_other_process");
    send_fds(other.socket.as_fd(), &[shared.fd], &shared.fd_len.to_le_bytes(), &NEVER).unwrap();
    assert_eq!(other.word(), 1, "the peer sees our bytes");
    assert_eq!(other.word(), 1);
    let mut got = vec![0; 5000];
    pool.read_at(70_000, &mut got).unwrap();
    assert!(got == noise(2, 5000), "we see the peer's bytes");
    other.kill();
    pool.read_at(0, &mut got).unwrap();
    assert!(got == noise(1, 5000), "a killed peer leaves the pool as it was");
}

#[test]
fn a_pool_is_one_memory_in_two_processes() {
    with_a_peer(HugePages::Never);
}

#[test]
fn a_pool_that_asks_for_huge_pages_is_one_memory_in_two_processes() {
    with_a_peer(HugePages::Try);
}

#[test]
fn a_mapping_to_read_refuses_every_write() {
    let pool = HostRegion::allocate(8192, HugePages::Never).unwrap();
    pool.write_at(0, b"here").unwrap();
    let fd = pool.shared().unwrap().fd.try_clone_to_owned().unwrap();
    let view = HostRegion::map_peer(fd, 8192, false).unwrap();
    drop(pool);
    let mut got = [0; 4];
    view.read_at(0, &mut got).unwrap();
    assert_eq!(&got, b"here");
    let own = HostRegion::allocate(8192, HugePages::Never).unwrap();
    assert!(!view.writable() && view.shared().is_none());
    for error in [
        view.write_at(0, b"no").unwrap_err(),
        view.fill(0, 1, 0).unwrap_err(),
        pdkv_device::copy(&view, 0, &own, 0, 8192).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Region);
    }
    pdkv_device::copy(&own, 0, &view, 0, 8192).unwrap();
}

#[test]
fn only_a_sealed_memfd_of_full_length_is_mapped() {
    let memfd = |seals: SealFlags| {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, 8192).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let refused = |fd: OwnedFd, len| HostRegion::map_peer(fd, len, true).unwrap_err();
    assert!(refused(memfd(SealFlags::GROW), 8192).message().contains("not sealed"));
    assert!(refused(memfd(SealFlags::SHRINK), 8193).message().contains("`8193`"));
    let file = File::open("/dev/zero").unwrap();
    assert!(refused(file.into(), 4096).message().contains("no memfd"));
    for len in [0, u64::MAX, 1 << 63] {
        assert_eq!(refused(memfd(SealFlags::SHRINK), len).kind(), ErrorKind::Region);
    }
    let whole = memfd(SealFlags::SHRINK);
    rustix::io::pwrite(&whole, &[1; 8192], 0).unwrap();
    HostRegion::map_peer(whole, 4097, true).unwrap();
}

/// A sealed memfd that has only the pages in `kept` of `len` bytes.
fn sparse(len: u64, kept: &[std::ops::Range<u64>]) -> OwnedFd {
    let fd = memfd_create("sparse", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, len).unwrap();
    for range in kept {
        rustix::io::pwrite(&fd, &vec![1; (range.end - range.start) as usize], range.start).unwrap();
    }
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    fd
}

#[test]
fn pages_that_a_peer_has_not_are_not_made_for_it() {
    // More than this machine has: were it populated, this process would be gone.
    const LEN: u64 = 1 << 40;
    let fd = sparse(LEN, &[0..8192, LEN - 4096..LEN]);
    let look = fd.try_clone().unwrap();
    let kept = || rustix::fs::fstat(&look).unwrap().st_blocks;
    let before = kept();
    let map = |offset, len| HostRegion::map_peer_at(fd.try_clone().unwrap(), offset, len, true, &NEVER);
    for (offset, len) in [(0, 8193), (4096, 8192), (LEN - 4097, 4097), (1 << 39, 4096), (0, LEN)] {
        let error = map(offset, len).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Region, "{offset} {len}");
        assert!(error.message().contains("not all pages"), "{error}");
    }
    // What is there can be had, wherever it lies.
    map(0, 8192).unwrap();
    map(5000, 3000).unwrap();
    map(LEN - 4096, 4096).unwrap();
    assert_eq!(kept(), before, "pages came to be");
}

#[test]
fn a_mapping_that_is_told_to_stop_is_none() {
    let pool = HostRegion::allocate(8192, HugePages::Never).unwrap();
    let fd = pool.shared().unwrap().fd.try_clone_to_owned().unwrap();
    let error = HostRegion::map_peer_at(fd, 0, 8192, true, &Instant::now()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TransferCancelled);
}

#[test]
fn descriptors_for_somebody_who_takes_none_are_sent_no_longer_than_allowed() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    pdkv_device::configure_stream(ours.as_fd(), Duration::from_millis(1)).unwrap();
    let pool = HostRegion::allocate(4096, HugePages::Never).unwrap();
    let fd = pool.shared().unwrap().fd;
    let send = |_| {
        send_fds(
            ours.as_fd(),
            &[fd],
            &[0; 512],
            &(Instant::now() + Duration::from_millis(100)),
        )
        .err()
    };
    let error = (0..100_000).find_map(send);
    assert_eq!(error.unwrap().kind(), ErrorKind::TransferCancelled);
}

#[test]
fn impossible_pools_are_errors() {
    for len in [0, u64::MAX, 1 << 63] {
        for huge in [HugePages::Never, HugePages::Try] {
            assert_eq!(
                HostRegion::allocate(len, huge).unwrap_err().kind(),
                ErrorKind::Region,
                "{len}"
            );
        }
    }
    let error = HostRegion::allocate(1 << 62, HugePages::Try).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Capacity);
}

#[test]
fn memory_handed_in_as_an_address_is_found_in_its_pool() {
    let pool = HostRegion::allocate(8192, HugePages::Never).unwrap();
    let (found, offset) = HostRegion::find_shared(pool.address() + 100, 8000).unwrap();
    assert_eq!((found.address(), offset), (pool.address(), 100));
    assert!(HostRegion::find_shared(pool.address() + 100, 8093).is_none());
    let address = pool.address();
    drop((pool, found));
    assert!(HostRegion::find_shared(address + 100, 8000).is_none());
}

#[test]
fn a_part_is_mapped_from_its_own_offset() {
    for huge in [HugePages::Never, HugePages::Try] {
        let pool = HostRegion::allocate(BYTES, huge).unwrap();
        pool.write_at(0, &noise(1, BYTES)).unwrap();
        let part = pool.part(5000, 20_000).unwrap();
        let inner = part.part(100, 9000).unwrap();
        drop((pool, part));
        let shared = inner.shared().unwrap();
        assert_eq!((shared.fd_offset, shared.region_offset, shared.fd_len), (5100, 0, 9000));
        let fd = shared.fd.try_clone_to_owned().unwrap();
        let view = HostRegion::map_peer_at(fd, shared.fd_offset, shared.fd_len, true, &NEVER).unwrap();
        let mut got = vec![0; 9000];
        view.read_at(0, &mut got).unwrap();
        assert!(got == noise(1, 14_100)[5100..]);
        view.write_at(8999, b"!").unwrap();
        inner.read_at(8999, &mut got[..1]).unwrap();
        assert_eq!(got[0], b'!');
        assert_eq!(inner.part(1, 9000).unwrap_err().kind(), ErrorKind::Region);
        assert_eq!(inner.part(1, 0).unwrap_err().kind(), ErrorKind::Region);
        let fd = inner.shared().unwrap().fd.try_clone_to_owned().unwrap();
        let (start, beyond) = (inner.shared().unwrap().fd_offset, 4 * BYTES);
        for (offset, len) in [(start, beyond), (beyond, 1), (u64::MAX, 1)] {
            let error = HostRegion::map_peer_at(fd.try_clone().unwrap(), offset, len, true, &NEVER).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Region);
        }
    }
}

#[test]
fn dropped_mappings_are_gone_from_the_address_space() {
    let mapped = |address: u64| {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines()
            .any(|line| line.starts_with(&format!("{address:08x}-")) && line.contains("pdkv-pool"))
    };
    for huge in [HugePages::Never, HugePages::Try] {
        // A size of its own, so that nothing else of this process comes to lie at the same place.
        let pool = HostRegion::allocate(13 << 20, huge).unwrap();
        let fd = pool.shared().unwrap().fd.try_clone_to_owned().unwrap();
        let view = HostRegion::map_peer(fd, (13 << 20) - 4097, false).unwrap();
        let (ours, theirs) = (pool.address(), view.address());
        assert!(
            mapped(ours) || mapped(theirs),
            "neighbours may have merged, but not both"
        );
        drop((pool, view));
        assert!(!mapped(ours) && !mapped(theirs));
    }
}

#[test]
fn descriptors_beyond_what_is_expected_are_refused_and_closed() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let pool = HostRegion::allocate(4096, HugePages::Never).unwrap();
    let fd = pool.shared().unwrap().fd;
    send_fds(ours.as_fd(), &[fd, fd, fd], b"three", &NEVER).unwrap();
    let mut bytes = [0; 16];
    let error = recv_fds(theirs.as_fd(), &mut bytes, 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Handshake);
    send_fds(ours.as_fd(), &[fd, fd], b"two", &NEVER).unwrap();
    let (count, fds) = recv_fds(theirs.as_fd(), &mut bytes, 2).unwrap().unwrap();
    assert_eq!((&bytes[..count], fds.len()), (&b"two"[..], 2));
    send_fds(ours.as_fd(), &[], b"none", &NEVER).unwrap();
    assert!(recv_fds(theirs.as_fd(), &mut bytes, 2).unwrap().unwrap().1.is_empty());
    assert_eq!(
        send_fds(ours.as_fd(), &[fd], b"", &NEVER).unwrap_err().kind(),
        ErrorKind::Config
    );
    assert_eq!(
        send_fds(ours.as_fd(), &[fd; 254], b"x", &NEVER).unwrap_err().kind(),
        ErrorKind::Config
    );
    theirs.set_nonblocking(true).unwrap();
    assert!(recv_fds(theirs.as_fd(), &mut bytes, 2).unwrap().is_none());
    (&ours).write_all(b"!").unwrap();
    drop(ours);
    assert!(recv_fds(theirs.as_fd(), &mut bytes, 2).unwrap().is_some());
    assert_eq!(
        recv_fds(theirs.as_fd(), &mut bytes, 2).unwrap_err().kind(),
        ErrorKind::PeerLost
    );
}
