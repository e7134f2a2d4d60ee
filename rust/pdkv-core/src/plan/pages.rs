//! The plan for pages: segments of two block tables × lanes × strided dims.
//!
//! A unit is one block position of one lane, numbered lane by lane. Lanes come of the layouts alone, so that they are kept for
//! all plans between the same two caches.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use super::explain::Explanation;
use super::lanes::{Lane, Lanes, Shape};
use super::segments::Segments;
use super::{CopyRun, Kind, Place, Plan, Proven, Selection, refuse};
use crate::Result;
use crate::block_table::BlockTable;
use crate::layout::KvLayout;

#[derive(Debug)]
pub(super) struct Pages {
    pub(super) segments: Segments<2>,
    pub(super) lanes: Arc<Lanes>,
    total_bytes: u64,
}

/// Some layers of two caches: what all plans between their blocks have in common.
#[derive(Clone, Debug)]
pub struct Pairing {
    lanes: Arc<Lanes>,
    /// Of the source and of the destination.
    region_bytes: [Arc<[u64]>; 2],
    num_blocks: [u32; 2],
    /// Bytes of a block position in all layers.
    block_bytes: u64,
}

impl Pairing {
    /// Pairs the selected layers. The layouts may differ in place and stride (NHD to HND, layer-compact to block-outermost), not
    /// in meaning. Takes O(layers).
    ///
    /// # Errors
    /// `Layout` when the meanings differ or a layer is out of range.
    pub fn new(src: &KvLayout, dst: &KvLayout, selection: &Selection) -> Result<Self> {
        let differences = src.differences(dst);
        if !differences.is_empty() {
            let list: Vec<_> = differences
                .iter()
                .map(|d| {
                    format!(
                        "{} is `{}` at the source and `{}` at the destination",
                        d.field, d.ours, d.theirs
                    )
                })
                .collect();
            return Err(refuse(list.join(", ")));
        }
        selection.validate(src)?;
        Ok(Self {
            lanes: Arc::new(Lanes::new(src, dst, selection.first_layer, selection.num_layers)),
            region_bytes: [src.region_bytes().into(), dst.region_bytes().into()],
            num_blocks: [src.num_blocks(), dst.num_blocks()],
            block_bytes: src.layer_block_bytes() * u64::from(selection.num_layers),
        })
    }

    /// Plans copying `src_blocks` onto `dst_blocks`, block by block. A source block may come twice, a destination block may not. Takes
    /// O(blocks), however many layers there are.
    ///
    /// # Errors
    /// `Layout` when the tables have different lengths, a block is out of range, or a destination block comes twice.
    pub fn plan(&self, src_blocks: &BlockTable, dst_blocks: &BlockTable) -> Result<Plan> {
        let [src, dst] = self.num_blocks;
        src_blocks.validate(src)?;
        // The layout's pieces are disjoint, so unique blocks make unique bytes.
        dst_blocks.check_unique(dst)?;
        let segments = Segments::zip(src_blocks, dst_blocks)?;
        let total_bytes = self
            .block_bytes
            .checked_mul(u64::from(segments.positions()))
            .ok_or_else(|| refuse("the plan is beyond 64 bits"))?;
        let pages = Pages {
            segments,
            lanes: Arc::clone(&self.lanes),
            total_bytes,
        };
        Ok(Plan(Arc::new(Proven {
            kind: Kind::Pages(pages),
            region_bytes: self.region_bytes.clone(),
        })))
    }
}

impl Pages {
    pub(super) fn unit_count(&self) -> u64 {
        self.lanes.list.len() as u64 * u64::from(self.segments.positions())
    }

    pub(super) fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    pub(super) fn run_count(&self) -> u64 {
        let lane_runs = |lane: &Lane| {
            let shape = self.lanes.shape(lane);
            if shape.blocks_merge {
                shape.pieces() * self.segments.count() as u64
            } else {
                shape.pieces() * u64::from(self.segments.positions())
            }
        };
        self.lanes.list.iter().map(lane_runs).sum()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.segments.memory_bytes() + self.lanes.memory_bytes()
    }

    #[inline]
    pub(super) fn walk(&self, units: Range<u64>, mut f: impl FnMut(CopyRun) -> ControlFlow<()>) -> ControlFlow<()> {
        let positions = u64::from(self.segments.positions());
        let end = units.end.min(self.unit_count());
        let mut unit = units.start;
        while unit < end {
            let position = unit % positions;
            let count = (positions - position).min(end - unit);
            let lane = &self.lanes.list[(unit / positions) as usize];
            self.walk_lane(lane, position as u32, count as u32, &mut f)?;
            unit += count;
        }
        ControlFlow::Continue(())
    }

    #[inline]
    fn walk_lane(
        &self,
        lane: &Lane,
        first: u32,
        count: u32,
        f: &mut impl FnMut(CopyRun) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let shape = self.lanes.shape(lane);
        for ([src, dst], len) in self.segments.range(first, count) {
            let mut src = lane.src.plus(u64::from(src) * shape.block.src_stride);
            let mut dst = lane.dst.plus(u64::from(dst) * shape.block.dst_stride);
            if shape.blocks_merge {
                emit(shape, src, dst, shape.chunk * u64::from(len), f)?;
                continue;
            }
            for _ in 0..len {
                emit(shape, src, dst, shape.chunk, f)?;
                // Past the last block of a cache this may leave 64 bits; it is not used then.
                src.offset = src.offset.wrapping_add(shape.block.src_stride);
                dst.offset = dst.offset.wrapping_add(shape.block.dst_stride);
            }
        }
        ControlFlow::Continue(())
    }

    pub(super) fn explain(&self, memory_bytes: usize) -> Explanation {
        Explanation {
            kind: "pages",
            blocks: u64::from(self.segments.positions()),
            segments: self.segments.count() as u64,
            lanes: self.lanes.list.len() as u64,
            units: self.unit_count(),
            runs: self.run_count(),
            total_bytes: self.total_bytes,
            chunk_bytes: self.lanes.shapes.iter().map(|shape| shape.chunk).min().unwrap_or(0),
            pieces: self.lanes.shapes.iter().map(Shape::pieces).max().unwrap_or(0),
            blocks_merge: self.lanes.shapes.iter().all(|shape| shape.blocks_merge),
            memory_bytes: memory_bytes as u64,
        }
    }
}

/// Calls `f` for the pieces of one block, or of neighbouring ones that continue each chunk.
#[inline]
fn emit(
    shape: &Shape,
    src: Place,
    dst: Place,
    len: u64,
    f: &mut impl FnMut(CopyRun) -> ControlFlow<()>,
) -> ControlFlow<()> {
    match shape.num_dims {
        0 => f(CopyRun { src, dst, len }),
        1 => strided(&shape.dims[0], src, dst, |src, dst| f(CopyRun { src, dst, len })),
        _ => strided(&shape.dims[0], src, dst, |src, dst| {
            strided(&shape.dims[1], src, dst, |src, dst| f(CopyRun { src, dst, len }))
        }),
    }
}

#[inline]
fn strided(
    dim: &super::lanes::Dim,
    src: Place,
    dst: Place,
    mut f: impl FnMut(Place, Place) -> ControlFlow<()>,
) -> ControlFlow<()> {
    for step in 0..dim.count {
        f(src.plus(step * dim.src_stride), dst.plus(step * dim.dst_stride))?;
    }
    ControlFlow::Continue(())
}
