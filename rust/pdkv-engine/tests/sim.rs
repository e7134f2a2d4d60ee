//! The protocol under the seeded world. A failing seed is printed and replays by itself.

use pdkv_engine::sim::{Faults, Report, SimConfig, run};

fn check(report: &Report) {
    assert!(
        report.violations.is_empty(),
        "seed {} breaks promises:\n{}",
        report.seed,
        report.violations.join("\n")
    );
}

#[test]
fn a_quiet_network_fills_offers_and_finishes_pulls() {
    let mut sum = Report::default();
    for seed in 0..40 {
        let config = SimConfig {
            faults: Faults::none(),
            ..SimConfig::from_seed(seed)
        };
        let report = run(seed, &config);
        check(&report);
        sum.done += report.done;
        sum.filled += report.filled;
    }
    assert!(sum.done > 200 && sum.filled > 40, "{sum:?}");
}

#[test]
fn promises_hold_on_every_seed() {
    let mut sum = Report::default();
    for seed in 0..1200 {
        let report = run(seed, &SimConfig::from_seed(seed));
        check(&report);
        sum.done += report.done;
        sum.failed += report.failed;
        sum.cancelled += report.cancelled;
        sum.crashes += report.crashes;
        sum.filled += report.filled;
    }
    // The histories must be eventful, or they prove nothing.
    assert!(sum.done > 3000 && sum.failed > 3000 && sum.cancelled > 300, "{sum:?}");
    assert!(sum.crashes > 300 && sum.filled > 300, "{sum:?}");
}

#[test]
fn a_seed_is_one_history() {
    for seed in [3, 17, 404] {
        let config = SimConfig::from_seed(seed);
        assert_eq!(run(seed, &config), run(seed, &config));
    }
}
