//! Page walks against the oracle: the addresses of a stream, byte by byte, in wire order.

use std::ops::{ControlFlow, Range};

use pdkv_core::plan::{PageWalk, Selection, WireAxis, WireOrder};
use proptest::prelude::*;

use crate::caches::{Cache, Counts, Placement, counts, placement, table, tables};

const AXES: [WireAxis; 5] = [
    WireAxis::Layer,
    WireAxis::Plane,
    WireAxis::Block,
    WireAxis::Head,
    WireAxis::Token,
];

/// The addresses of all bytes in wire order.
fn expected(cache: &Cache, counts: &Counts, ids: &[u32], layers: Range<u64>, order: WireOrder) -> Vec<u64> {
    let sizes = [
        layers.end - layers.start,
        counts.planes,
        ids.len() as u64,
        counts.heads,
        counts.tokens,
    ];
    let mut addresses = Vec::new();
    let total: u64 = sizes.iter().product();
    for number in 0..total {
        let mut index = [0; 5];
        let mut rest = number;
        for &axis in order.axes().iter().rev() {
            let axis = axis as usize;
            index[axis] = rest % sizes[axis];
            rest /= sizes[axis];
        }
        index[0] += layers.start;
        index[2] = u64::from(ids[index[2] as usize]);
        addresses.extend((0..counts.content * 2).map(|byte| cache.address(index, byte)));
    }
    addresses
}

fn walked(walk: &PageWalk, cache: &Cache, units: Range<u64>) -> (Vec<u64>, usize) {
    let (mut addresses, mut spans) = (Vec::new(), 0);
    let flow = walk.walk(units, |span| {
        spans += 1;
        let at = cache.region_address(span.region, span.offset);
        addresses.extend(at..at + span.len);
        ControlFlow::Continue(())
    });
    assert!(flow.is_continue());
    (addresses, spans)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// The same stream for every placement: so a receiver scatters what the sender gathered.
    #[test]
    fn a_walk_is_the_stream_of_its_order(
        (counts, placement, ids, layers, cut) in (counts(), placement()).prop_flat_map(|(counts, placement)| {
            let ids = tables(placement.blocks, placement.blocks);
            let total = counts.layers;
            let layers = (0..total).prop_flat_map(move |first| (Just(first), first + 1..=total));
            (Just(counts), Just(placement), ids, layers, any::<u64>())
        }),
        order in Just(AXES).prop_shuffle(),
        natural in any::<bool>(),
    ) {
        let cache = Cache::new(&counts, &placement);
        let layout = &cache.resolved.layout;
        let order = if natural { WireOrder::natural(layout) } else { WireOrder::new(order).unwrap() };
        let selection = Selection::layers(layers.0 as u32, (layers.1 - layers.0) as u32);
        for ids in [&ids.0, &ids.1] {
            let walk = PageWalk::new(layout, &table(ids), &selection, order).unwrap();
            let expected = expected(&cache, &counts, ids, layers.0..layers.1, order);
            prop_assert_eq!(walk.total_bytes(), expected.len() as u64);
            prop_assert_eq!(walk.unit_bytes() * walk.unit_count(), walk.total_bytes());
            prop_assert_eq!(&walked(&walk, &cache, 0..u64::MAX).0, &expected);
            let cut = cut % (walk.unit_count() + 1);
            let at = (cut * walk.unit_bytes()) as usize;
            prop_assert_eq!(&walked(&walk, &cache, 0..cut).0[..], &expected[..at]);
            prop_assert_eq!(&walked(&walk, &cache, cut..walk.unit_count()).0[..], &expected[at..]);
        }
    }
}

#[test]
fn the_natural_order_needs_the_fewest_spans() {
    let counts = Counts {
        layers: 4,
        planes: 2,
        heads: 3,
        tokens: 2,
        content: 2,
    };
    // Spans for blocks 2, 3, 4 and 0.
    let cases = [
        ([0, 1, 2, 3, 4], 2 * 8),
        ([0, 1, 2, 4, 3], 2 * 8),
        ([0, 1, 3, 2, 4], 2 * 8 * 3),
        ([0, 2, 1, 4, 3], 2 * 4),
        ([2, 0, 1, 3, 4], 2),
        ([2, 3, 0, 1, 4], 2),
        ([1, 0, 2, 3, 4], 2 * 8),
    ];
    for (memory, spans) in cases {
        let cache = Cache::new(&counts, &Placement::dense(6, memory));
        let layout = &cache.resolved.layout;
        let order = WireOrder::natural(layout);
        let axes: Vec<_> = order.axes().iter().map(|&axis| axis as usize).collect();
        assert_eq!(axes, memory);
        let walk = PageWalk::new(layout, &table(&[2, 3, 4, 0]), &Selection::all(layout), order).unwrap();
        assert_eq!(walked(&walk, &cache, 0..u64::MAX).1, spans, "{memory:?}");
    }
}

#[test]
fn only_a_reader_may_visit_a_block_twice() {
    let counts = Counts {
        layers: 1,
        planes: 1,
        heads: 1,
        tokens: 2,
        content: 2,
    };
    let cache = Cache::new(&counts, &Placement::dense(4, [0, 1, 2, 3, 4]));
    let layout = &cache.resolved.layout;
    let all = Selection::all(layout);
    for order in [WireOrder::LAYER_MAJOR, WireOrder::BLOCK_MAJOR] {
        assert!(PageWalk::new(layout, &table(&[1, 1]), &all, order).is_ok());
        assert!(PageWalk::scatter(layout, &table(&[1, 2]), &all, order).is_ok());
        assert!(PageWalk::scatter(layout, &table(&[1, 1]), &all, order).is_err());
        assert!(PageWalk::new(layout, &table(&[4]), &all, order).is_err());
        assert!(PageWalk::new(layout, &table(&[1]), &Selection::layers(0, 2), order).is_err());
    }
}

#[test]
fn a_walk_stops_when_told() {
    let counts = Counts {
        layers: 3,
        planes: 2,
        heads: 2,
        tokens: 2,
        content: 2,
    };
    let cache = Cache::new(&counts, &Placement::dense(4, [0, 1, 2, 4, 3]));
    let layout = &cache.resolved.layout;
    for order in [
        WireOrder::LAYER_MAJOR,
        WireOrder::BLOCK_MAJOR,
        WireOrder::natural(layout),
    ] {
        let walk = PageWalk::new(layout, &table(&[1, 3]), &Selection::all(layout), order).unwrap();
        let mut spans = 0;
        let flow = walk.walk(0..u64::MAX, |_| {
            spans += 1;
            if spans == 3 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        assert!(flow.is_break() && spans == 3);
    }
}
