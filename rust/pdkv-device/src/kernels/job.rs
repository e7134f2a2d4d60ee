//! What there is to copy, in the terms of the kernels: lanes of one shape, and tables of pages.

use pdkv_core::plan::{BlockShape, Geometry};

use super::view::Lane;

/// Strides of the pages of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// Bytes from entry to entry of the table.
    pub page_stride: u64,
    /// Pages that an entry holds: more than 1 where the other side's pages are smaller. At least 1.
    pub parts: u32,
    /// Bytes from part to part of an entry.
    pub part_stride: u64,
}

/// A strided axis of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Pieces along it, at least 1.
    pub count: u32,
    /// Bytes from piece to piece at the source.
    pub src_stride: u64,
    /// Bytes from piece to piece at the destination.
    pub dst_stride: u64,
    /// Logical bytes from piece to piece.
    pub logical_stride: u64,
}

/// One page of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of a piece, contiguous on both sides; at least 1. Where lanes differ, those of the longest.
    pub chunk_bytes: u64,
    /// The source's pages.
    pub src: Side,
    /// The destination's pages.
    pub dst: Side,
    /// The axes along which pieces lie, outer first.
    pub axes: [Axis; 2],
}

/// Lanes of one shape, copied page by page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// What one page is.
    pub shape: Shape,
    /// The lanes.
    pub lanes: Vec<Lane>,
    /// Pages of each lane: the entries of the tables times their parts.
    pub num_pages: u32,
}

/// The pages of both sides by position; `None` where entry `i` is page `i`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageTables {
    /// The source's.
    pub src: Option<Vec<u32>>,
    /// The destination's.
    pub dst: Option<Vec<u32>>,
}

impl PageTables {
    /// The tables of a plan.
    pub fn of(geometry: &Geometry<'_>) -> Self {
        let mut tables = Self::default();
        tables.fill(*geometry, &mut Vec::new());
        tables
    }

    /// The tables of a plan, in the memory of earlier ones; `spare` keeps what is not needed now.
    pub(super) fn fill(&mut self, geometry: Geometry<'_>, spare: &mut Vec<Vec<u32>>) {
        self.clear(spare);
        let mut table = |first: fn(&pdkv_core::plan::BlockPairs) -> u32| {
            let mut pages = spare.pop().unwrap_or_default();
            pages.reserve(geometry.positions() as usize);
            for run in geometry.blocks() {
                pages.extend((first(&run)..).take(run.len as usize));
            }
            let counts = (0..).zip(&pages).all(|(position, &page)| position == page);
            if counts {
                pages.clear();
                spare.push(pages);
                return None;
            }
            Some(pages)
        };
        self.src = table(|run| run.src);
        self.dst = table(|run| run.dst);
    }

    /// Entry `i` is page `i` on both sides.
    pub(super) fn clear(&mut self, spare: &mut Vec<Vec<u32>>) {
        for mut pages in [self.src.take(), self.dst.take()].into_iter().flatten() {
            pages.clear();
            spare.push(pages);
        }
    }
}

impl Shape {
    pub(super) fn of(shape: &BlockShape) -> Self {
        let side = |page_stride| Side {
            page_stride,
            parts: 1,
            part_stride: 0,
        };
        let mut next = shape.chunk_bytes;
        let mut axes = [1, 0].map(|index| {
            let axis = shape.axes[index];
            let logical_stride = next;
            next *= axis.count;
            Axis {
                // Heads and tokens, which a layout counts in 32 bits.
                count: axis.count as u32,
                src_stride: axis.src_stride,
                dst_stride: axis.dst_stride,
                logical_stride,
            }
        });
        axes.reverse();
        Self {
            chunk_bytes: shape.chunk_bytes,
            src: side(shape.src_block_stride),
            dst: side(shape.dst_block_stride),
            axes,
        }
    }

    /// Pieces of a page.
    pub fn pieces(&self) -> u64 {
        self.axes.iter().map(|axis| u64::from(axis.count)).product()
    }

    /// Bytes of a page of one lane.
    pub fn page_bytes(&self) -> u64 {
        self.pieces() * self.chunk_bytes
    }
}

impl Job {
    /// Bytes of all pages.
    pub fn total_bytes(&self) -> u64 {
        let lanes: u64 = self.lanes.iter().map(|lane| lane.bytes).sum();
        lanes * self.shape.pieces() * u64::from(self.num_pages)
    }

    /// The widest vector, up to 16 bytes, to which everything is aligned; for checksums, logical offsets too.
    pub(super) fn vector_bytes(&self, sums: bool) -> u32 {
        let Shape { src, dst, axes, .. } = &self.shape;
        let logical = |offset: u64| if sums { offset } else { 0 };
        let mut bits = 16 | src.page_stride | dst.page_stride;
        for side in [src, dst] {
            bits |= if side.parts > 1 { side.part_stride } else { 0 };
        }
        for axis in axes.iter().filter(|axis| axis.count > 1) {
            bits |= axis.src_stride | axis.dst_stride | logical(axis.logical_stride);
        }
        for lane in &self.lanes {
            bits |= lane.src | lane.dst | lane.bytes | logical(lane.logical);
        }
        1 << bits.trailing_zeros()
    }
}
