//! Page plans against the oracle: which address goes to which, every destination byte once.

use std::ops::{ControlFlow, Range};

use pdkv_core::ErrorKind;
use pdkv_core::plan::{Pairing, Plan, Selection};
use proptest::prelude::*;

use crate::caches::{Cache, Counts, Order, Placement, counts, placement, table, tables};

/// (destination address, source address) of every byte, ascending.
type Bytes = Vec<(u64, u64)>;

fn expected(src: &Cache, dst: &Cache, counts: &Counts, ids: (&[u32], &[u32]), layers: Range<u64>) -> Bytes {
    let mut bytes = Bytes::new();
    for (&from, &to) in ids.0.iter().zip(ids.1) {
        for layer in layers.clone() {
            for plane in 0..counts.planes {
                for head in 0..counts.heads {
                    for token in 0..counts.tokens {
                        for byte in 0..counts.content * 2 {
                            let at = |cache: &Cache, block: u32| {
                                cache.address([layer, plane, u64::from(block), head, token], byte)
                            };
                            bytes.push((at(dst, to), at(src, from)));
                        }
                    }
                }
            }
        }
    }
    bytes.sort_unstable();
    bytes
}

/// Walks the units and returns the bytes and the number of runs.
fn walked(plan: &Plan, src: &Cache, dst: &Cache, ranges: &[Range<u64>]) -> (Bytes, u64) {
    let (mut bytes, mut runs) = (Bytes::new(), 0);
    for range in ranges {
        let flow = plan.walk(range.clone(), |run| {
            runs += 1;
            assert!(run.len > 0);
            let (from, to) = (
                src.region_address(run.src.region, run.src.offset),
                dst.region_address(run.dst.region, run.dst.offset),
            );
            bytes.extend((0..run.len).map(|byte| (to + byte, from + byte)));
            ControlFlow::Continue(())
        });
        assert!(flow.is_continue());
    }
    bytes.sort_unstable();
    (bytes, runs)
}

/// The fewest contiguous copies that move these bytes.
fn fewest(bytes: &Bytes) -> u64 {
    let breaks = bytes
        .windows(2)
        .filter(|pair| pair[0].0 + 1 != pair[1].0 || pair[0].1 + 1 != pair[1].1)
        .count() as u64;
    breaks + u64::from(!bytes.is_empty())
}

fn check(src: &Cache, dst: &Cache, counts: &Counts, ids: (&[u32], &[u32]), layers: Range<u64>, cuts: &[u64]) -> Plan {
    let selection = Selection::layers(layers.start as u32, (layers.end - layers.start) as u32);
    let (from, to) = (&src.resolved.layout, &dst.resolved.layout);
    let pairing = Pairing::new(from, to, &selection).unwrap();
    // Of other blocks before, in vain and not: nothing of it stays.
    assert!(pairing.plan(&table(&[u32::MAX]), &table(&[0])).is_err());
    let first = pairing.plan(&table(&[0]), &table(&[0])).unwrap();
    let plan = pairing.plan(&table(ids.0), &table(ids.1)).unwrap();
    assert_eq!(first.total_bytes() * ids.0.len() as u64, plan.total_bytes());
    let expected = expected(src, dst, counts, ids, layers);
    assert!(
        expected.windows(2).all(|pair| pair[0].0 < pair[1].0),
        "the oracle writes a byte twice"
    );
    let units = plan.unit_count();
    let (bytes, runs) = walked(&plan, src, dst, std::slice::from_ref(&(0..units)));
    assert_eq!(bytes, expected);
    assert_eq!(runs, plan.run_count());
    assert!(runs >= fewest(&expected));
    assert_eq!(bytes.len() as u64, plan.total_bytes());
    assert!(plan.unit_bytes_hint() * units >= plan.total_bytes());
    let mut cuts: Vec<_> = cuts.iter().map(|cut| cut % (units + 1)).chain([0, units]).collect();
    cuts.sort_unstable();
    let ranges: Vec<_> = cuts.windows(2).rev().map(|pair| pair[0]..pair[1]).collect();
    assert_eq!(walked(&plan, src, dst, &ranges).0, expected, "in ranges {ranges:?}");
    let explanation = plan.explain();
    assert_eq!((explanation.runs, explanation.units), (runs, units));
    plan
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn every_byte_goes_where_the_oracle_says(
        (counts, src, dst, ids, layers, cuts) in (counts(), placement(), placement()).prop_flat_map(|(counts, src, dst)| {
            let ids = tables(src.blocks, dst.blocks);
            let layers = (0..counts.layers).prop_flat_map({
                let total = counts.layers;
                move |first| (Just(first), first + 1..=total)
            });
            (Just(counts), Just(src), Just(dst), ids, layers, prop::collection::vec(any::<u64>(), 0..5))
        }),
    ) {
        let (src, dst) = (Cache::new(&counts, &src), Cache::new(&counts, &dst));
        check(&src, &dst, &counts, (&ids.0, &ids.1), layers.0..layers.1, &cuts);
    }
}

/// The six orders of block, head and token, in layer-compact and in block-outermost form.
fn memory_orders() -> Vec<(&'static str, Order)> {
    vec![
        ("LKBHN", [0, 1, 2, 3, 4]),
        ("LKBNH", [0, 1, 2, 4, 3]),
        ("LKHBN", [0, 1, 3, 2, 4]),
        ("LKHNB", [0, 1, 3, 4, 2]),
        ("LKNBH", [0, 1, 4, 2, 3]),
        ("LKNHB", [0, 1, 4, 3, 2]),
        ("LBKHN", [0, 2, 1, 3, 4]),
        ("BLKHN", [2, 0, 1, 3, 4]),
        ("BLKNH", [2, 0, 1, 4, 3]),
        ("BHLKN", [2, 3, 0, 1, 4]),
        ("BKLHN", [2, 1, 0, 3, 4]),
        ("KLBHN", [1, 0, 2, 3, 4]),
    ]
}

fn counts_of(layers: u64, planes: u64, heads: u64, tokens: u64) -> Counts {
    Counts {
        layers,
        planes,
        heads,
        tokens,
        content: 2,
    }
}

#[test]
fn every_order_to_every_order() {
    let counts = counts_of(2, 2, 3, 2);
    for (_, from) in memory_orders() {
        for (_, to) in memory_orders() {
            let src = Cache::new(&counts, &Placement::dense(6, from));
            let dst = Cache::new(&counts, &Placement::dense(5, to));
            check(&src, &dst, &counts, (&[4, 5, 0, 2, 2], &[1, 2, 4, 0, 3]), 0..2, &[3, 7]);
        }
    }
}

#[test]
fn equal_orders_merge_as_far_as_memory_allows() {
    let counts = counts_of(4, 2, 3, 2);
    // Blocks 2,3,4 and 0 in both: how many copies remain.
    let expected = [
        ("LKBHN", 2 * 8),
        ("LKBNH", 2 * 8),
        ("LKHBN", 2 * 8 * 3),
        ("LKNBH", 2 * 8 * 2),
        ("LBKHN", 2 * 4),
        ("BLKHN", 2),
        ("BLKNH", 2),
        ("BHLKN", 2),
        ("BKLHN", 2),
        ("KLBHN", 2 * 8),
    ];
    for (name, runs) in expected {
        let order = memory_orders().into_iter().find(|(known, _)| *known == name).unwrap().1;
        let src = Cache::new(&counts, &Placement::dense(6, order));
        let dst = Cache::new(&counts, &Placement::dense(7, order));
        let plan = check(&src, &dst, &counts, (&[2, 3, 4, 0], &[1, 2, 3, 6]), 0..4, &[2]);
        assert_eq!(plan.run_count(), runs, "{name}: {}", plan.explain());
    }
}

#[test]
fn offsets_beyond_32_bits() {
    let counts = counts_of(2, 1, 2, 2);
    let far = Placement {
        pads: [0, 0, 1 << 40, 0, 1 << 33],
        ..Placement::dense(5, [0, 1, 2, 3, 4])
    };
    let near = Placement::dense(5, [0, 1, 2, 4, 3]);
    let (far, near) = (Cache::new(&counts, &far), Cache::new(&counts, &near));
    assert!(far.resolved.layout.region_bytes()[0] > 1 << 42);
    check(&far, &near, &counts, (&[4, 1], &[0, 3]), 0..2, &[]);
    check(&near, &far, &counts, (&[4, 1], &[0, 3]), 0..2, &[]);
}

#[test]
fn what_can_not_be_posted_is_refused() {
    let counts = counts_of(2, 1, 2, 2);
    let cache = Cache::new(&counts, &Placement::dense(4, [0, 1, 2, 3, 4]));
    let other = Cache::new(&counts_of(2, 1, 1, 4), &Placement::dense(4, [0, 1, 2, 3, 4]));
    let (layout, other) = (&cache.resolved.layout, &other.resolved.layout);
    let all = Selection::all(layout);
    let cases = [
        (
            Plan::pages(layout, &table(&[0, 1]), layout, &table(&[2]), &all),
            "`2` source blocks",
        ),
        (
            Plan::pages(layout, &table(&[4]), layout, &table(&[2]), &all),
            "block `4`",
        ),
        (
            Plan::pages(layout, &table(&[1]), layout, &table(&[4]), &all),
            "block `4`",
        ),
        (
            Plan::pages(layout, &table(&[0, 1]), layout, &table(&[2, 2]), &all),
            "more than once",
        ),
        (
            Plan::pages(layout, &table(&[0]), other, &table(&[0]), &all),
            "num_heads is `2` at the source and `1` at the destination, block_tokens is `2` at the source and `4` at",
        ),
        (
            Plan::pages(layout, &table(&[0]), layout, &table(&[0]), &Selection::layers(1, 2)),
            "`2` layers from `1`",
        ),
        (
            Plan::pages(layout, &table(&[0]), layout, &table(&[0]), &Selection::layers(1, 0)),
            "`0` layers",
        ),
        (
            Plan::pages(
                layout,
                &table(&[0]),
                layout,
                &table(&[0]),
                &Selection::layers(u32::MAX, 2),
            ),
            "`2` layers",
        ),
    ];
    for (plan, part) in cases {
        let error = plan.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Layout);
        assert!(error.message().contains(part), "{error}");
    }
}

#[test]
fn an_explanation_says_why() {
    let counts = counts_of(2, 1, 2, 2);
    let dense = Placement::dense(4, [0, 1, 2, 3, 4]);
    let padded = Placement {
        pads: [0, 0, 8, 0, 0],
        ..dense.clone()
    };
    let cases = [
        (dense.clone(), "neighbouring blocks merge"),
        (padded, "blocks of 16 bytes do not merge"),
        (Placement::dense(4, [0, 1, 2, 4, 3]), "in 4 pieces of 4 bytes"),
    ];
    let src = Cache::new(&counts, &dense);
    for (placement, part) in cases {
        let dst = Cache::new(&counts, &placement);
        let plan = check(&src, &dst, &counts, (&[0, 1], &[2, 3]), 0..2, &[]);
        let text = plan.explain().to_string();
        assert!(
            text.contains(part) && text.contains("2 blocks in 1 segments x 2 lanes"),
            "{text}"
        );
    }
}

#[test]
fn an_empty_table_is_an_empty_plan() {
    let counts = counts_of(2, 1, 2, 2);
    let cache = Cache::new(&counts, &Placement::dense(4, [0, 1, 2, 3, 4]));
    let plan = check(&cache, &cache, &counts, (&[], &[]), 0..2, &[]);
    assert_eq!((plan.unit_count(), plan.total_bytes(), plan.run_count()), (0, 0, 0));
}

#[test]
fn a_walk_stops_when_told_and_ignores_units_past_the_end() {
    let counts = counts_of(2, 1, 2, 2);
    let cache = Cache::new(&counts, &Placement::dense(4, [0, 1, 2, 3, 4]));
    let layout = &cache.resolved.layout;
    let plan = Plan::pages(
        layout,
        &table(&[0, 2]),
        layout,
        &table(&[3, 1]),
        &Selection::all(layout),
    )
    .unwrap();
    let mut runs = 0;
    let flow = plan.walk(0..u64::MAX, |_| {
        runs += 1;
        if runs == 3 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    assert!(flow.is_break() && runs == 3);
    assert!(plan.walk(4..9, |_| ControlFlow::Break(())).is_continue());
    assert!(plan.walk(u64::MAX..u64::MAX, |_| ControlFlow::Break(())).is_continue());
}
