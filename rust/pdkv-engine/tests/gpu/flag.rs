//! The word by which a copy tells its end: what goes well asks the driver nothing, and no end hangs on the word.

use pdkv_engine::PullOptions;

use crate::common::standin::{count, fail, is_here_with, reset};
use crate::common::{Memory, Pair, WAIT, Way};
use crate::{came_over, pair, pull};

/// What is asked happens at once, so that looks come late and never early.
const EAGER: &[(&str, &str)] = &[("PDKV_STANDIN_EAGER", "1")];

fn asked() -> i64 {
    count("calls cuEventQuery") + count("calls cuStreamQuery")
}

#[test]
fn pulls_that_go_well_ask_the_driver_nothing() {
    if !is_here_with("flag::pulls_that_go_well_ask_the_driver_nothing", EAGER) {
        return;
    }
    for [producer, consumer] in [
        [Memory::Device, Memory::Device],
        [Memory::Private, Memory::Device],
        [Memory::Device, Memory::Private],
    ] {
        let pair = Pair::new(Way::cuda(producer, consumer));
        for _ in 0..5 {
            pull(&pair, &PullOptions::default()).wait(WAIT).unwrap();
        }
        came_over(&pair);
        assert_eq!(asked(), 0, "{producer:?} to {consumer:?}");
    }
}

#[test]
fn a_pull_whose_flag_never_comes_ends_by_the_drivers_word() {
    if !is_here_with("flag::a_pull_whose_flag_never_comes_ends_by_the_drivers_word", EAGER) {
        return;
    }
    let pair = pair();
    fail(c"flag", 0, 1);
    let before = asked();
    pull(&pair, &PullOptions::default()).wait(WAIT).unwrap();
    assert!(asked() > before);
    came_over(&pair);
    reset();
    let before = asked();
    pull(&pair, &PullOptions::default()).wait(WAIT).unwrap();
    assert_eq!(asked(), before);
    came_over(&pair);
}
