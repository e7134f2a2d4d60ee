//! A plan of pages taken apart, for movers that walk the block tables themselves: runs over the tables, lanes, shapes.
//!
//! A device gets these few numbers instead of a list of copies. What [`Plan::walk`](super::Plan::walk) visits and what these
//! describe are the same bytes.

use super::lanes::{Dim, Shape};
use super::pages::Pages;
use super::{Place, Plan};

/// The parts of a plan of pages.
#[derive(Clone, Copy, Debug)]
pub struct Geometry<'a>(pub(super) &'a Pages);

/// Positions whose blocks are consecutive on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPairs {
    /// The first source block.
    pub src: u32,
    /// The destination block that it fills.
    pub dst: u32,
    /// Number of blocks.
    pub len: u32,
}

/// One source plane and the destination plane it fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanePair {
    /// Block 0 at the source.
    pub src: Place,
    /// Block 0 at the destination.
    pub dst: Place,
    /// Index of the shape of its blocks.
    pub shape: usize,
}

/// A strided axis of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedAxis {
    /// Pieces along it, at least 1.
    pub count: u64,
    /// Bytes from piece to piece at the source; 0 for a single piece.
    pub src_stride: u64,
    /// Bytes from piece to piece at the destination; 0 for a single piece.
    pub dst_stride: u64,
}

/// One block of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShape {
    /// Bytes of a piece, contiguous on both sides.
    pub chunk_bytes: u64,
    /// Bytes from block to block at the source.
    pub src_block_stride: u64,
    /// Bytes from block to block at the destination.
    pub dst_block_stride: u64,
    /// The axes along which pieces lie, outer first.
    pub axes: [StridedAxis; 2],
}

impl Plan {
    /// The parts of a plan of pages; `None` for a plan of spans.
    pub fn geometry(&self) -> Option<Geometry<'_>> {
        match &self.0.kind {
            super::Kind::Pages(pages) => Some(Geometry(pages)),
            super::Kind::Spans(_) => None,
        }
    }
}

impl<'a> Geometry<'a> {
    /// Number of positions in the block tables.
    pub fn positions(&self) -> u32 {
        self.0.segments.positions()
    }

    /// The blocks of all positions in order, in stretches.
    pub fn blocks(&self) -> impl Iterator<Item = BlockPairs> + 'a {
        let segments = &self.0.segments;
        segments
            .range(0, segments.positions())
            .map(|([src, dst], len)| BlockPairs { src, dst, len })
    }

    /// The pairs of planes, in the order of the plan's units.
    pub fn lanes(&self) -> impl ExactSizeIterator<Item = PlanePair> + 'a {
        self.0.lanes.list.iter().map(|lane| PlanePair {
            src: lane.src,
            dst: lane.dst,
            shape: lane.shape as usize,
        })
    }

    /// The distinct shapes of blocks.
    pub fn shapes(&self) -> impl ExactSizeIterator<Item = BlockShape> + 'a {
        self.0.lanes.shapes.iter().map(BlockShape::of)
    }
}

impl BlockShape {
    fn of(shape: &Shape) -> Self {
        let axis = |index: usize| match &shape.dims[index] {
            Dim { count, .. } if index >= shape.num_dims || *count == 1 => StridedAxis {
                count: 1,
                src_stride: 0,
                dst_stride: 0,
            },
            dim => StridedAxis {
                count: dim.count,
                src_stride: dim.src_stride,
                dst_stride: dim.dst_stride,
            },
        };
        // One axis alone is the inner one.
        let axes = match shape.num_dims {
            2 => [axis(0), axis(1)],
            _ => [axis(1), axis(0)],
        };
        Self {
            chunk_bytes: shape.chunk,
            src_block_stride: shape.block.src_stride,
            dst_block_stride: shape.block.dst_stride,
            axes,
        }
    }
}
