//! Memory that is lent by a worker without one-sided copies: the kernel carries a peer's puts and gets out, UCX's
//! software doesn't.

#![allow(clippy::print_stdout, reason = "a test says what it skipped and what it found")]

mod common;

use std::time::{Duration, Instant};

use common::cases::{lane, over};
use common::{bytes, lanes, library, memory, pattern};
use pdkv_ucx::{Context, ErrorMode, Features, Link, Tally, Worker};

const LEN: u64 = 1 << 20;

#[test]
fn the_kernel_needs_no_consent_and_software_gets_none() {
    over("case_lent", &["posix,cma", "sysv,cma", "posix", "sysv"]);
}

#[test]
fn case_lent() {
    let Some(tls) = lane() else { return };
    let library = library().unwrap();
    let open = |one_sided| Context::open(&library, &lanes(&tls), Features { one_sided }).unwrap();
    let (owner, initiator) = (open(false), open(true));
    let (far, near) = (Worker::create(&owner).unwrap(), Worker::create(&initiator).unwrap());
    let (lent, mine) = (memory(&owner, LEN, 1), memory(&initiator, LEN, 2));
    let endpoint = near.connect(&far.address().unwrap(), ErrorMode::None).unwrap();
    let until = |over: &dyn Fn() -> bool, patience: Duration| {
        let start = Instant::now();
        while !over() && start.elapsed() < patience {
            near.progress();
            far.progress();
        }
        over()
    };
    assert!(
        until(&|| endpoint.ready(), common::PATIENCE),
        "a worker without one-sided copies takes connections"
    );
    let base = lent.region().address();
    let key = endpoint.unpack(&lent.pack().unwrap(), base, LEN).unwrap();
    let tally = Tally::new(&near);
    let probe = endpoint.probe_put(&mine, 0, &key, 0, 64, &tally).unwrap();
    let kernel = probe.certain && probe.transports.iter().all(|lane| lane.link() == Link::KernelCopy);
    println!("note: {probe:?}");
    if !kernel {
        until(&|| bytes(&lent, 0, 64) != pattern(64, 1), Duration::from_millis(500));
        assert!(bytes(&lent, 0, LEN) == pattern(LEN, 1), "software wrote for the peer");
        return;
    }
    for len in [1, 8, 64, 1000, 4096, 65536, LEN] {
        mine.region().write_at(0, &pattern(LEN, len as u8)).unwrap();
        endpoint.put(&mine, 0, &key, 0, len, &tally).unwrap();
        endpoint.flush(&tally).unwrap();
        assert!(until(&|| tally.outstanding() == 0, common::PATIENCE), "a put of {len}");
        assert!(bytes(&lent, 0, len) == pattern(len, len as u8), "a put of {len}");
        lent.region().write_at(0, &pattern(LEN, !(len as u8))).unwrap();
        endpoint.get(&mine, 0, &key, 0, len, &tally).unwrap();
        assert!(until(&|| tally.outstanding() == 0, common::PATIENCE), "a get of {len}");
        assert!(bytes(&mine, 0, len) == pattern(len, !(len as u8)), "a get of {len}");
    }
    assert!(tally.failure().is_none());
}
