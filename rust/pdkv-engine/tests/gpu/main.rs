//! What `cuda` does when something goes wrong, and between processes; over a stand-in for the driver, as no GPU has run it.

#[path = "../common/mod.rs"]
mod common;

mod asking;
mod doors;
mod failures;
mod far_lanes;
mod flag;
mod forged;
mod held_up;
mod lanes;
mod links;
mod moved;
mod order;
mod processes;
mod raw_fence;
mod replaced;
mod stages;
mod threads;
mod verified;
mod ways;

use std::time::{Duration, Instant};

use common::{LAYERS, LEASE, Memory, Pair, WAIT, Way, table};
use pdkv_engine::{PullOptions, Transfer, TransferState};

/// Waits for something that nobody announces.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < WAIT.unwrap(), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How often the driver was asked which memory an address holds: it has two numbers for that.
fn looks() -> i64 {
    common::standin::count("calls cuPointerGetAttribute") / 2
}

/// Two engines with caches on the GPU.
fn pair() -> Pair {
    Pair::new(Way::cuda(Memory::Device, Memory::Device))
}

/// A pull of blocks 5 and 6 into 1 and 2.
fn pull(pair: &Pair, options: &PullOptions) -> Transfer {
    let export = pair.source.export(table(&[5, 6]), 8, b"", 1, LEASE).unwrap();
    pair.target.pull(export.reference(), table(&[1, 2]), options).unwrap()
}

/// A pull that the GPU has been asked for, and that it doesn't do while things are held.
fn pull_under_way(pair: &Pair, options: &PullOptions) -> Transfer {
    let before = common::standin::count("launches");
    let transfer = pull(pair, options);
    eventually("the launch", || common::standin::count("launches") > before);
    assert_eq!(transfer.state(), TransferState::Moving);
    transfer
}

fn came_over(pair: &Pair) {
    pair.check(&[(1, 5), (2, 6)], 0..LAYERS);
}
