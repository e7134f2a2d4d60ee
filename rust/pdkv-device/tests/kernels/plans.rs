//! Any plan, run by the twin, leaves the bytes that the planner's walk says and the sums of the Rust twin.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::ControlFlow;

use pdkv_core::layout::KvLayout;
use pdkv_core::plan::{Plan, Selection};
use pdkv_device::kernels::{
    Checksum, DeviceFacts, Entry, Job, Jobs, PageTables, Wishes, launches, read_backs, reference,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::caches::{Cache, Counts, Placement, table, tables};
use crate::cases::{counts, device, placement, wishes};
use crate::memory::Memory;
use crate::twin::{Build, Twin, compile};

/// What the planner's walk copies.
fn walked(plan: &Plan, memory: &Memory, sources: usize) -> Memory {
    let mut result = memory.clone();
    let _ = plan.walk(0..plan.unit_count(), |run| {
        let from = memory.regions[run.src.region as usize].1[run.src.offset as usize..][..run.len as usize].to_vec();
        let to = &mut result.regions[sources + run.dst.region as usize].1;
        to[run.dst.offset as usize..][..run.len as usize].copy_from_slice(&from);
        ControlFlow::Continue(())
    });
    result
}

/// Runs a plan by the twin and compares all that it leaves. Returns the kernels that ran, and the sums of the pages.
pub(crate) fn check(
    twin: &mut Twin,
    plan: &Plan,
    [src, dst]: [&[u64]; 2],
    device: &DeviceFacts,
    wishes: Wishes,
    seed: u32,
) -> (Vec<Entry>, Vec<u64>) {
    let memory = Memory::new(src, dst);
    let expected = walked(plan, &memory, src.len());
    let (src_bases, dst_bases) = memory.bases(src.len());
    let Jobs { list: jobs, tables, .. } = &Jobs::of(plan, &src_bases, &dst_bases).unwrap();
    assert_eq!(jobs.iter().map(Job::total_bytes).sum::<u64>(), plan.total_bytes());
    let pages = jobs.iter().map(|job| job.num_pages).max().unwrap_or(0);
    let mut sums = vec![Checksum::default(); pages as usize];
    let mut plain = memory.clone();
    for job in jobs {
        reference::run(job, tables, &mut plain, &mut sums);
    }
    assert!(plain == expected, "the Rust twin and the planner's walk differ");
    let work: Vec<_> = jobs
        .iter()
        .map(|job| (job, launches(job, device, wishes).unwrap()))
        .collect();
    let mut entries: Vec<_> = work
        .iter()
        .flat_map(|(_, list)| list)
        .map(|launch| launch.entry)
        .collect();
    let outcome = twin
        .run(&memory, tables, &work, seed, 77)
        .expect("the twin lives; what ended it stands above");
    assert!(outcome.memory == expected, "wrong bytes by {entries:?}");
    let sums: Vec<u64> = sums.into_iter().map(Checksum::value).collect();
    if wishes.sums {
        assert_eq!(outcome.sums, sums, "sums of {entries:?}");
    }
    // Without work there is no launch, and whoever has nothing to wait for needs no flag.
    assert_eq!(
        (outcome.flag, outcome.arrived),
        (if entries.is_empty() { 0 } else { 77 }, 0)
    );
    entries.extend(read_back(twin, &expected, tables, jobs, (device, wishes), &sums));
    (entries, sums)
}

/// What was placed, read where it lies, has the sums of what was read, and is left as it is. Returns the kernels that ran.
fn read_back(
    twin: &mut Twin,
    placed: &Memory,
    tables: &PageTables,
    jobs: &[Job],
    (device, wishes): (&DeviceFacts, Wishes),
    sums: &[u64],
) -> Vec<Entry> {
    let back = |job| (job, read_backs(job, device, wishes).unwrap());
    let work: Vec<_> = jobs.iter().map(back).collect();
    let launches = work.iter().flat_map(|(_, list)| list);
    let entries = launches.map(|launch| launch.entry).collect();
    let outcome = twin
        .run(placed, tables, &work, 3, 0)
        .expect("the twin lives; what ended it stands above");
    assert!(outcome.memory == *placed, "{entries:?} have written");
    assert_eq!(outcome.sums, sums, "sums of {entries:?}");
    entries
}

type Ids = (Vec<u32>, Vec<u32>);

fn world() -> impl Strategy<Value = (Counts, Placement, Placement, Ids, (u64, u64), DeviceFacts, Wishes, u32)> {
    (counts(), placement(), placement()).prop_flat_map(|(counts, src, dst)| {
        let ids = tables(src.blocks, dst.blocks);
        let layers = (0..counts.layers).prop_flat_map({
            let total = counts.layers;
            move |first| (Just(first), first + 1..=total)
        });
        // One order in two makes long pieces.
        let dst = prop_oneof![
            Just(dst.clone()),
            Just(Placement {
                memory: src.memory,
                ..dst
            })
        ];
        let rest = (device(), wishes(), any::<u32>());
        (Just(counts), Just(src), dst, ids, layers, rest).prop_map(
            |(counts, src, dst, ids, layers, (device, wishes, seed))| {
                (counts, src, dst, ids, layers, device, wishes, seed)
            },
        )
    })
}

fn many(build: Build, cases: u32) {
    let Some(program) = compile(build) else {
        return;
    };
    let twin = RefCell::new(Twin::start(program));
    let seen = RefCell::new(BTreeMap::new());
    let config = Config {
        failure_persistence: None,
        ..Config::default()
    };
    // `PROPTEST_CASES` scales the number.
    let cases = cases * config.cases / 256;
    TestRunner::new(Config { cases, ..config })
        .run(&world(), |(counts, src, dst, ids, layers, device, wishes, seed)| {
            let (src, dst) = (Cache::new(&counts, &src), Cache::new(&counts, &dst));
            let layouts = [&src.resolved.layout, &dst.resolved.layout];
            let selection = Selection::layers(layers.0 as u32, (layers.1 - layers.0) as u32);
            let plan = Plan::pages(layouts[0], &table(&ids.0), layouts[1], &table(&ids.1), &selection).unwrap();
            let (entries, _) = check(
                &mut twin.borrow_mut(),
                &plan,
                layouts.map(KvLayout::region_bytes),
                &device,
                wishes,
                seed,
            );
            for entry in entries {
                *seen.borrow_mut().entry(entry.name()).or_insert(0) += 1;
            }
            Ok(())
        })
        .unwrap();
    let seen = seen.into_inner();
    let missing: Vec<_> = Entry::all(9)
        .into_iter()
        .map(Entry::name)
        .filter(|name| !seen.contains_key(name))
        .collect();
    // Few cases cannot reach them all.
    assert!(
        cases < 500 || missing.is_empty(),
        "never chosen: {missing:?} of {seen:?}"
    );
}

#[test]
fn any_plan_as_the_planner_walks_it() {
    many(Build::Plain, 800);
}

#[test]
fn any_plan_under_sanitizers() {
    many(Build::Sanitized, 160);
}
