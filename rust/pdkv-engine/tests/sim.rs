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

/// Runs the seeds on all cores; the histories must be eventful, or they prove nothing.
#[test]
fn promises_hold_on_every_seed() {
    const SEEDS: u64 = 1200;
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let sums: Vec<Report> = std::thread::scope(|scope| {
        let worker = |first: u64| {
            let mut sum = Report::default();
            for seed in (first..SEEDS).step_by(threads as usize) {
                let report = run(seed, &SimConfig::from_seed(seed));
                check(&report);
                sum.done += report.done;
                sum.failed += report.failed;
                sum.cancelled += report.cancelled;
                sum.crashes += report.crashes;
                sum.filled += report.filled;
                sum.promised += report.promised;
                sum.early += report.early;
            }
            sum
        };
        let workers: Vec<_> = (0..threads).map(|first| scope.spawn(move || worker(first))).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().expect("a seed failed, see above"))
            .collect()
    });
    let total = |count: fn(&Report) -> u64| sums.iter().map(count).sum::<u64>();
    assert!(
        total(|r| r.done) > 3000 && total(|r| r.failed) > 3000 && total(|r| r.cancelled) > 300,
        "{sums:?}"
    );
    assert!(total(|r| r.crashes) > 300 && total(|r| r.filled) > 300, "{sums:?}");
    assert!(total(|r| r.promised) > 1000 && total(|r| r.early) > 1000, "{sums:?}");
}

#[test]
fn a_seed_is_one_history() {
    for seed in [3, 17, 404] {
        let config = SimConfig::from_seed(seed);
        assert_eq!(run(seed, &config), run(seed, &config));
    }
}
