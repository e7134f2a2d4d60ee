//! Packed pages lie as a walk in the same order puts them on a stream, and a plan's parts are what its walk visits.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use pdkv_core::plan::{PageWalk, Plan, Selection, WireAxis, WireOrder};
use proptest::prelude::*;

use crate::caches::{Cache, counts, placement, table, tables};

proptest! {
    #[test]
    fn a_packed_layout_is_the_stream_of_a_walk(
        (counts, placement, ids, axes) in (counts(), placement()).prop_flat_map(|(counts, placement)| {
            let axes = [WireAxis::Layer, WireAxis::Plane, WireAxis::Block, WireAxis::Head, WireAxis::Token];
            let ids = tables(placement.blocks, placement.blocks);
            (Just(counts), Just(placement), ids, Just(axes).prop_shuffle())
        }),
    ) {
        let (ids, order) = (ids.1, WireOrder::new(axes).unwrap());
        let cache = Cache::new(&counts, &placement);
        let layout = &cache.resolved.layout;
        if ids.is_empty() {
            prop_assert!(layout.packed(0, order).is_err());
            return Ok(());
        }
        let all = Selection::all(layout);
        let walk = PageWalk::new(layout, &table(&ids), &all, order).unwrap();
        let mut stream = Vec::new();
        let _ = walk.walk(0..walk.unit_count(), |span| {
            stream.extend((0..span.len).map(|byte| (span.region, span.offset + byte)));
            ControlFlow::Continue(())
        });
        let packed = layout.packed(ids.len() as u32, order).unwrap();
        prop_assert_eq!(packed.region_bytes(), [stream.len() as u64]);
        let identity: Vec<u32> = (0..ids.len() as u32).collect();
        let plan = Plan::pages(layout, &table(&ids), &packed, &table(&identity), &all).unwrap();
        let (mut found, mut visited) = (vec![(0, 0); stream.len()], BTreeMap::new());
        let _ = plan.walk(0..plan.unit_count(), |run| {
            for byte in 0..run.len {
                found[(run.dst.offset + byte) as usize] = (run.src.region, run.src.offset + byte);
                visited.insert(run.dst.offset + byte, (run.src.region, run.src.offset + byte));
            }
            ControlFlow::Continue(())
        });
        prop_assert!(found == stream);
        prop_assert!(by_parts(&plan) == visited);
    }
}

/// What the parts of a plan say: for each destination offset, the source's region and offset.
fn by_parts(plan: &Plan) -> BTreeMap<u64, (u32, u64)> {
    let geometry = plan.geometry().unwrap();
    let shapes: Vec<_> = geometry.shapes().collect();
    let mut found = BTreeMap::new();
    for lane in geometry.lanes() {
        let shape = shapes[lane.shape];
        let [outer, inner] = shape.axes;
        for run in geometry.blocks() {
            for step in 0..run.len {
                for (o, i) in (0..outer.count).flat_map(|o| (0..inner.count).map(move |i| (o, i))) {
                    let block = |first: u32, stride: u64| u64::from(first + step) * stride;
                    let src = lane.src.offset
                        + block(run.src, shape.src_block_stride)
                        + o * outer.src_stride
                        + i * inner.src_stride;
                    let dst = lane.dst.offset
                        + block(run.dst, shape.dst_block_stride)
                        + o * outer.dst_stride
                        + i * inner.dst_stride;
                    found.extend((0..shape.chunk_bytes).map(|byte| (dst + byte, (lane.src.region, src + byte))));
                }
            }
        }
    }
    found
}
