//! Spans of any lengths and places: a few launches move them all, byte for byte as the planner walks them.

use std::cell::RefCell;
use std::ops::ControlFlow;

use pdkv_core::ErrorKind;
use pdkv_core::plan::Plan;
use pdkv_core::span::Span;
use pdkv_device::kernels::{DeviceFacts, Entry, Jobs, Run, Wishes, launches};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::cases::{device, wishes};
use crate::plans::check;
use crate::twin::{Build, Twin, compile};

const REGION: u64 = 1 << 18;

/// A span of some length, how far its source lies into the region, and how many bytes are left free before its destination.
type Wish = (u64, u64, u64);

fn length() -> impl Strategy<Value = u64> {
    prop_oneof![
        0_u64..40,
        (1_u64..64).prop_map(|vectors| vectors * 16),
        Just(4096),
        1_u64..9000,
        60_000_u64..70_000
    ]
}

/// Gaps and offsets that keep an alignment, more often than not.
fn place(most: u64) -> impl Strategy<Value = u64> {
    let aligned = |unit: u64| (0..most / unit).prop_map(move |units| units * unit);
    prop_oneof![3 => aligned(16), 1 => aligned(4), 1 => aligned(1)]
}

fn wish() -> impl Strategy<Value = Wish> {
    (length(), place(REGION / 2), place(64))
}

/// Sources anywhere in two regions, destinations one after the other in one.
fn plan(list: &[Wish]) -> (Plan, Vec<u64>) {
    let (mut src, mut dst, mut next) = (Vec::new(), Vec::new(), 0);
    for (number, &(len, offset, gap)) in list.iter().enumerate() {
        src.push(Span::new(number as u32 % 2, offset, len));
        dst.push(Span::new(0, next + gap, len));
        next += gap + len;
    }
    let plan = Plan::spans(&src, &[REGION; 2], &dst, &[next]).unwrap();
    (plan, vec![next])
}

fn many(build: Build, cases: u32) {
    let Some(program) = compile(build) else {
        return;
    };
    let twin = RefCell::new(Twin::start(program));
    let config = Config {
        failure_persistence: None,
        ..Config::default()
    };
    let cases = cases * config.cases / 256;
    let world = (
        proptest::collection::vec(wish(), 0..40),
        device(),
        wishes(),
        any::<u32>(),
    );
    TestRunner::new(Config { cases, ..config })
        .run(&world, |(list, device, wishes, seed)| {
            let (plan, dst) = plan(&list);
            let (entries, _) = check(
                &mut twin.borrow_mut(),
                &plan,
                [&[REGION; 2], &dst],
                &device,
                wishes,
                seed,
            );
            // As many read back.
            prop_assert!(entries.len() <= 2 * Entry::WIDTHS.len(), "{entries:?}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn any_spans_as_the_planner_walks_them() {
    many(Build::Plain, 600);
}

#[test]
fn any_spans_under_sanitizers() {
    many(Build::Sanitized, 120);
}

const H200: DeviceFacts = DeviceFacts {
    capability: (9, 0),
    multiprocessors: 132,
    threads_per_multiprocessor: 2048,
    shared_bytes: 228 << 10,
    block_shared_bytes: 227 << 10,
};

/// What is launched for spans: kernels, and bytes of all tiles that are numbered.
fn launched(list: &[Wish]) -> (Vec<Entry>, u64, Jobs) {
    let jobs = Jobs::of(&plan(list).0, &[1 << 40, 1 << 41], &[1 << 42]).unwrap();
    let launches: Vec<_> = jobs
        .list
        .iter()
        .flat_map(|job| launches(job, &H200, Wishes::default()).unwrap())
        .collect();
    let numbered = |view: pdkv_device::kernels::View| u64::from(view.num_items) * u64::from(view.tile_bytes);
    let numbered = launches.iter().map(|launch| numbered(launch.view)).sum();
    (launches.iter().map(|launch| launch.entry).collect(), numbered, jobs)
}

#[test]
fn many_uneven_spans_are_one_launch() {
    // Aligned, of 200 lengths.
    let list: Vec<Wish> = (1..=200).map(|number| (number * 16, number * 32, 16)).collect();
    let (entries, numbered, jobs) = launched(&list);
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert!(matches!(entries[0], Entry::Tiles { .. }));
    assert_eq!(jobs.list[0].lanes.len(), 200, "none was long enough to be cut");
    assert!(
        numbered <= 4 * jobs.total_bytes(),
        "{numbered} of {}",
        jobs.total_bytes()
    );
    // One byte too many at the end of each: the middles stay wide, the rest is a launch of its own.
    let mut list: Vec<Wish> = list.iter().map(|&(len, src, _)| (len + 1, src, 15)).collect();
    list[0].2 = 16;
    let (entries, ..) = launched(&list);
    let sums = false;
    assert_eq!(entries.len(), 2, "{entries:?}");
    assert!(matches!(entries[0], Entry::Tiles { .. }));
    assert_eq!(entries[1], Entry::Vectors { width: 1, sums });
}

#[test]
fn long_spans_among_short_ones_are_cut() {
    let mut list: Vec<Wish> = (0..100).map(|number| (4096, number * 4096 % (REGION / 2), 0)).collect();
    list.extend([(200_000 / 16 * 16, 16, 16), (200_000 / 16 * 16, 32, 16)]);
    let (entries, numbered, jobs) = launched(&list);
    assert_eq!(entries.len(), 1);
    assert!(jobs.list[0].lanes.len() > 102, "the long ones keep many blocks busy");
    assert!(jobs.list[0].lanes.len() <= 204);
    assert!(
        numbered <= 4 * jobs.total_bytes(),
        "{numbered} of {}",
        jobs.total_bytes()
    );
}

#[test]
fn runs_are_spans_whose_addresses_are_known() {
    let list: Vec<Wish> = (0..60).map(|number| (number * 37, number * 111, number % 3)).collect();
    let plan = plan(&list).0;
    let (src, dst) = ([1 << 40, 1 << 41], 1 << 42);
    let expected = Jobs::of(&plan, &src, &[dst]).unwrap();
    let mut runs = Vec::new();
    let _ = plan.walk(0..plan.unit_count(), |run| {
        runs.push(Run {
            src: src[run.src.region as usize] + run.src.offset,
            dst: dst + run.dst.offset,
            bytes: run.len,
        });
        ControlFlow::Continue(())
    });
    let mut jobs = Jobs::default();
    for _ in 0..2 {
        jobs.fill_runs(&runs).unwrap();
        assert_eq!(jobs.list, expected.list);
    }
    runs[5].src = u64::MAX - 1;
    let error = jobs.fill_runs(&runs).unwrap_err();
    assert_eq!((error.kind(), jobs.list.len()), (ErrorKind::Region, 0));
}

#[test]
fn a_region_without_an_address_is_refused_and_nothing_is_left() {
    let mut jobs = Jobs::default();
    let (plan, _) = plan(&[(64, 0, 0), (64, 64, 0)]);
    for (src, dst) in [(&[1 << 40][..], &[1 << 42][..]), (&[1 << 40, u64::MAX], &[1 << 42])] {
        let error = jobs.fill(&plan, src, dst).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Region);
        assert!(jobs.list.is_empty());
    }
}
