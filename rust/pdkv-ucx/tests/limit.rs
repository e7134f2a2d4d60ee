//! The benchmark's plain loop: moves what it is told, refuses what lies outside, and ends with its thread.

#![allow(clippy::print_stdout, reason = "a test says what it skipped")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::cases::{lane, over_all};
use common::{LANES, PATIENCE, lanes, library, pattern};
use pdkv_core::ErrorKind;
use pdkv_device::{HostRegion, HugePages};
use pdkv_ucx::limit::{Job, LoopEnd};
use pdkv_ucx::{Context, Direction, Features, Library};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 300;

struct Ends {
    near: LoopEnd,
    far: LoopEnd,
    near_memory: Arc<HostRegion>,
    far_memory: Arc<HostRegion>,
}

fn ends(library: &Library, tls: &str) -> Ends {
    let context = Context::open(library, &lanes(tls), Features { one_sided: true }).unwrap();
    let pool = || HostRegion::allocate(BLOCK * BLOCKS, HugePages::Never).unwrap();
    let (near_memory, far_memory) = (pool(), pool());
    let near = LoopEnd::open(&context, &near_memory).unwrap();
    let far = LoopEnd::open(&context, &far_memory).unwrap();
    near.connect(far.describe()).unwrap();
    far.connect(near.describe()).unwrap();
    Ends {
        near,
        far,
        near_memory,
        far_memory,
    }
}

fn job(direction: Direction, window: usize) -> Job {
    Job {
        direction,
        local: (0..BLOCKS).map(|i| i * BLOCK).collect(),
        remote: (0..BLOCKS).map(|i| i * 7 % BLOCKS * BLOCK).collect(),
        block_bytes: BLOCK,
        window,
    }
}

fn block(memory: &HostRegion, index: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK as usize];
    memory.read_at(index * BLOCK, &mut bytes).unwrap();
    bytes
}

#[test]
fn blocks_arrive_where_the_lists_say_over_every_lane_both_ways() {
    let Some(library) = library() else { return };
    for tls in LANES {
        let ends = ends(&library, tls);
        for (direction, window, seed) in [
            (Direction::Put, 16, 1),
            (Direction::Get, 1, 2),
            (Direction::Put, 1000, 3),
        ] {
            let (from, to) = match direction {
                Direction::Put => (&ends.near_memory, &ends.far_memory),
                Direction::Get => (&ends.far_memory, &ends.near_memory),
            };
            from.write_at(0, &pattern(BLOCK * BLOCKS, seed)).unwrap();
            let took = ends.near.run(job(direction, window)).unwrap();
            assert!(!took.is_zero());
            for i in 0..BLOCKS {
                let (near, far) = (block(&ends.near_memory, i), block(&ends.far_memory, i * 7 % BLOCKS));
                assert!(near == far, "{tls} {direction:?}: block {i}");
            }
            assert!(block(to, 0) == pattern(BLOCK * BLOCKS, seed)[..BLOCK as usize]);
        }
        // Either end may run the loop.
        ends.far.run(job(Direction::Get, 8)).unwrap();
    }
}

#[test]
fn what_lies_outside_is_refused_before_anything_moves() {
    let Some(library) = library() else { return };
    let ends = ends(&library, "tcp");
    let refused = |change: &dyn Fn(&mut Job)| {
        let mut job = job(Direction::Put, 4);
        change(&mut job);
        ends.near.run(job).unwrap_err().kind()
    };
    assert_eq!(
        refused(&|job| job.local[5] += 1 + BLOCK * (BLOCKS - 6)),
        ErrorKind::Region
    );
    assert_eq!(refused(&|job| job.remote[5] = u64::MAX), ErrorKind::Region);
    assert_eq!(refused(&|job| job.local.truncate(1)), ErrorKind::Config);
    assert_eq!(refused(&|job| job.window = 0), ErrorKind::Config);
    assert!(
        ends.near.run(job(Direction::Put, 4)).is_ok(),
        "a refusal breaks nothing"
    );
}

#[test]
fn an_end_that_is_not_connected_or_closed_says_so() {
    let Some(library) = library() else { return };
    let context = Context::open(&library, &lanes("tcp"), Features { one_sided: true }).unwrap();
    let end = LoopEnd::open(&context, &HostRegion::allocate(BLOCK, HugePages::Never).unwrap()).unwrap();
    assert_eq!(end.run(job(Direction::Put, 1)).unwrap_err().kind(), ErrorKind::Config);
    end.close();
    end.close();
    assert_eq!(end.run(job(Direction::Put, 1)).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn an_end_that_waits_sleeps_until_it_is_wanted() {
    over_all("case_an_end_that_waits");
}

#[test]
fn case_an_end_that_waits() {
    let Some(tls) = lane() else { return };
    let ends = ends(&library().unwrap(), &tls);
    for direction in [Direction::Put, Direction::Get] {
        ends.near.run(job(direction, 16)).unwrap();
        let started = Instant::now();
        loop {
            let before = turns();
            std::thread::sleep(Duration::from_millis(100));
            // UCX has timers of its own, far apart.
            if turns() - before < 5 {
                break;
            }
            assert!(started.elapsed() < PATIENCE, "the ends go on waking up");
        }
    }
    // Asleep at both ends, and still there when wanted.
    ends.far.run(job(Direction::Get, 8)).unwrap();
}

/// How often the threads of this process's ends have gone to sleep.
fn turns() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let texts = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok());
    let switches = texts
        .filter(|text| text.starts_with("Name:\tpdkv-ucx-limit\n"))
        .map(|text| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            line.unwrap().trim().parse::<u64>().unwrap()
        });
    switches.sum()
}
