//! Lists in one call, where the copy has them; the loop, where it doesn't.

#![allow(clippy::print_stdout, reason = "a test says what it skipped and what it found")]

mod common;

use common::cases::{lane, over_all};
use common::processes::{serve, start};
use common::{bytes, library};
use pdkv_core::ErrorKind;
use pdkv_ucx::{ErrorMode, Span, Tally, Version};

#[test]
fn far_side() {
    serve();
}

#[test]
fn a_list_arrives_or_is_refused() {
    over_all("case_a_list_arrives");
}

#[test]
fn case_a_list_arrives() {
    if lane().is_none() {
        return;
    }
    let version = library().unwrap().version();
    let (mut side, _far) = start(ErrorMode::None);
    let tally = Tally::new(side.worker());
    let spans: Vec<Span> = (0..256)
        .map(|at| Span {
            local_offset: at * 8192,
            remote_offset: (255 - at) * 8192,
            len: 4096 + at,
        })
        .collect();
    let posted = side.endpoint().put_list(&side.memory, side.key(), &spans, &tally);
    if version < Version::new(1, 23, 0) {
        assert_eq!(posted.unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!((tally.outstanding(), tally.failed()), (0, 0));
        return;
    }
    posted.unwrap();
    side.endpoint().flush(&tally).unwrap();
    side.wait(&tally);
    assert!(tally.failure().is_none(), "{:?}", tally.failure());
    for span in spans.iter().step_by(17) {
        let far = common::processes::far_bytes(&mut side, span.remote_offset, span.len);
        assert!(far == bytes(&side.memory, span.local_offset, span.len));
    }
    let probe = side
        .endpoint()
        .probe_list(&side.memory, side.key(), spans[0], &tally)
        .unwrap();
    side.wait(&tally);
    assert!(tally.failure().is_none());
    println!("note: {probe:?}");
    assert!(
        probe.certain && probe.emulated,
        "no lane of this host takes lists by itself"
    );
}
