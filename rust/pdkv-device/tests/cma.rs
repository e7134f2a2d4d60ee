//! Vectored kernel copies with a second, real process.

mod common;

use std::sync::Arc;

use common::{Other, noise, skipped, tell, word};
use pdkv_core::ErrorKind;
use pdkv_device::limits::cma_read;
use pdkv_device::{CMA_MAX_SPANS, CmaBatch, HostRegion, HugePages, Process};

const BYTES: u64 = 8 << 20;
const NONCE: u64 = 0x6E6F_6E63_6521_2121;

/// In the other process: a region of noise, its address told, checked on request, until the test ends.
#[test]
fn the_other_process() {
    let Some(mut socket) = common::parent() else { return };
    let region = pool();
    region.write_at(0, &noise(1, BYTES)).unwrap();
    let nonce = Box::new(NONCE);
    tell(&mut socket, region.address());
    tell(&mut socket, (&raw const *nonce).expose_provenance() as u64);
    let mut read = vec![0; 4096];
    while let offset @ 0..BYTES = word(&mut socket) {
        region.read_at(offset, &mut read).unwrap();
        tell(&mut socket, u64::from(read == noise(2, 4096)));
    }
}

fn pool() -> Arc<HostRegion> {
    HostRegion::allocate(BYTES, HugePages::Never).unwrap()
}

struct Pair {
    other: Other,
    process: Process,
    address: u64,
}

/// The second process, or `None` with the reason said where the kernel refuses to look into it.
fn pair(test: &str) -> Option<Pair> {
    let mut other = Other::start("the_other_process");
    let process = Process::open(other.pid()).unwrap();
    let (address, nonce) = (other.word(), other.word());
    match process.probe(nonce, &NONCE.to_ne_bytes()) {
        Ok(found) => assert!(found, "the nonce is there"),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            skipped(test, &error);
            return None;
        }
    }
    assert!(!process.probe(nonce, &(NONCE + 1).to_ne_bytes()).unwrap());
    Some(Pair {
        other,
        process,
        address,
    })
}

#[test]
fn scattered_spans_arrive_byte_for_byte_from_several_threads() {
    let Some(pair) = pair("scattered_spans") else { return };
    let local = pool();
    let blocks = BYTES / 512;
    let (local_ref, pair_ref) = (&*local, &pair);
    std::thread::scope(|scope| {
        for part in 0..4 {
            scope.spawn(move || {
                let mut batch = CmaBatch::new();
                let (mut moved, mut calls) = (0, 0);
                for block in (part..blocks).step_by(4) {
                    let from = pair_ref.address + block * 4097 % blocks * 512;
                    if batch.push(local_ref, block * 512, from, 512).unwrap() {
                        assert_eq!(batch.spans(), CMA_MAX_SPANS);
                        moved += batch.read(&pair_ref.process).unwrap();
                        calls += 1;
                        assert!(batch.is_empty());
                    }
                }
                moved += batch.read(&pair_ref.process).unwrap();
                assert_eq!((moved, calls), (BYTES / 4, blocks.div_ceil(4 * CMA_MAX_SPANS as u64)));
            });
        }
    });
    let source = noise(1, BYTES);
    let mut got = vec![0; BYTES as usize];
    local.read_at(0, &mut got).unwrap();
    for block in 0..blocks {
        let (to, from) = (block as usize * 512, (block * 4097 % blocks) as usize * 512);
        assert!(got[to..to + 512] == source[from..from + 512], "block {block}");
    }
}

#[test]
fn neighbours_merge_on_each_side_by_itself() {
    let Some(pair) = pair("neighbours_merge") else { return };
    let local = pool();
    let mut batch = CmaBatch::new();
    // Contiguous there, scattered here; then the reverse; then both.
    for block in 0..8 {
        batch
            .push(&local, block * 8192, pair.address + block * 4096, 4096)
            .unwrap();
    }
    assert_eq!(batch.spans(), 8);
    assert_eq!(batch.read(&pair.process).unwrap(), 8 * 4096);
    for block in 0..5000 {
        batch
            .push(&local, 1 << 20 | (block * 16), pair.address + block * 16, 16)
            .unwrap();
    }
    assert_eq!((batch.spans(), batch.bytes()), (1, 80_000));
    batch.read(&pair.process).unwrap();
    let mut got = vec![0; 80_000];
    local.read_at(1 << 20, &mut got).unwrap();
    assert!(got == noise(1, 80_000));
    local.read_at(7 * 8192, &mut got[..4096]).unwrap();
    assert!(got[..4096] == noise(1, 8 * 4096)[7 * 4096..]);
}

#[test]
fn a_write_is_seen_by_the_other_process() {
    let Some(mut pair) = pair("a_write_is_seen") else {
        return;
    };
    let local = pool();
    local.write_at(100, &noise(2, 4096)).unwrap();
    let mut batch = CmaBatch::new();
    batch.push(&local, 100, pair.address + 12_345, 4096).unwrap();
    assert_eq!(batch.write(&pair.process).unwrap(), 4096);
    pair.other.tell(12_345);
    assert_eq!(pair.other.word(), 1);
    pair.other.tell(12_346);
    assert_eq!(pair.other.word(), 0);
}

#[test]
fn an_address_that_is_not_mapped_is_a_region_error_and_says_how_far_it_came() {
    let Some(pair) = pair("an_address_that_is_not_mapped") else {
        return;
    };
    let local = pool();
    let mut batch = CmaBatch::new();
    batch.push(&local, 0, pair.address, 4096).unwrap();
    batch.push(&local, 4096, 4096, 4096).unwrap();
    let error = batch.read(&pair.process).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Region);
    assert!(error.message().contains("`0x1000`"), "{error}");
    assert!(
        error.context().contains(&("bytes_moved", "4096".to_owned())),
        "{error:?}"
    );
    assert!(batch.is_empty(), "nothing of a failed batch is left for the next one");
    batch.push(&local, 0, pair.address + 4096, 16).unwrap();
    assert_eq!(batch.read(&pair.process).unwrap(), 16);
}

#[test]
fn a_process_that_ended_is_lost_even_if_its_number_lives_on() {
    let Some(mut pair) = pair("a_process_that_ended") else {
        return;
    };
    let local = pool();
    pair.other.kill();
    assert!(!pair.process.alive());
    let mut batch = CmaBatch::new();
    batch.push(&local, 0, pair.address, 4096).unwrap();
    assert_eq!(batch.read(&pair.process).unwrap_err().kind(), ErrorKind::PeerLost);
    batch.push(&local, 0, pair.address, 4096).unwrap();
    assert_eq!(batch.write(&pair.process).unwrap_err().kind(), ErrorKind::PeerLost);
    let probe = pair.process.probe(pair.address, &[0]);
    assert_eq!(probe.unwrap_err().kind(), ErrorKind::PeerLost);
}

#[test]
fn pushes_are_checked() {
    let local = pool();
    let mut batch = CmaBatch::new();
    for (offset, remote, len) in [
        (BYTES, 4096, 1),
        (0, 4096, BYTES + 1),
        (u64::MAX, 4096, 2),
        (0, u64::MAX, 2),
    ] {
        assert_eq!(
            batch.push(&local, offset, remote, len).unwrap_err().kind(),
            ErrorKind::Region
        );
    }
    assert!(batch.is_empty());
    for block in 0..CMA_MAX_SPANS as u64 {
        let full = batch.push(&local, block * 32, (1 << 30) + block * 32, 16).unwrap();
        assert_eq!(full, block + 1 == CMA_MAX_SPANS as u64);
    }
    assert_eq!(
        batch.push(&local, BYTES / 2, 1 << 20, 16).unwrap_err().kind(),
        ErrorKind::Capacity
    );
    let mut batch = batch.recycle();
    assert!(batch.is_empty() && !batch.push(&local, 0, 1 << 20, 16).unwrap());
}

#[test]
fn the_limit_loop_reads_the_same_bytes() {
    let Some(pair) = pair("the_limit_loop") else { return };
    let local = pool();
    let to: Vec<u64> = (0..2048).map(|block| block * 4096).collect();
    let from: Vec<u64> = (0..2048).map(|block| pair.address + block * 4096).collect();
    for threads in [1, 2] {
        local.fill(0, BYTES, 0).unwrap();
        cma_read(&pair.process, &local, &to, &from, 4096, threads).unwrap();
        let mut got = vec![0; BYTES as usize];
        local.read_at(0, &mut got).unwrap();
        assert!(got == noise(1, BYTES));
    }
}
