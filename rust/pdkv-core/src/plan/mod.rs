//! Plans: which bytes go where, proven to write every destination byte exactly once.
//!
//! A plan is not a list of copies. For pages it is (runs over the two block tables) × (lanes: the
//! planes of the layers) × (strided dims inside a block), built in O(blocks) + O(layers) and
//! walked without allocation. Work is numbered in units, so that threads can take ranges of it in
//! any order. Nothing here moves a byte or knows a transport.

mod explain;
mod geometry;
mod lanes;
mod page_walk;
mod pages;
mod segments;
mod selection;
mod span_list;
mod wire_order;

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

pub use explain::Explanation;
pub use geometry::{BlockPairs, BlockShape, Geometry, PlanePair, StridedAxis};
pub use page_walk::PageWalk;
pub use pages::Pairing;
pub use selection::Selection;
pub use wire_order::{WireAxis, WireOrder};

use crate::block_table::BlockTable;
use crate::layout::KvLayout;
use crate::span::Span;
use crate::{Error, ErrorKind, Result};
use pages::Pages;
use span_list::SpanList;

/// A layout error met while planning.
fn refuse(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Layout, "plan", message)
}

/// A byte in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Index of the region in the layout or list of the side it belongs to.
    pub region: u32,
    /// Byte offset in the region.
    pub offset: u64,
}

impl Place {
    /// The place `bytes` further.
    #[inline]
    const fn plus(self, bytes: u64) -> Self {
        Self {
            region: self.region,
            offset: self.offset + bytes,
        }
    }
}

/// One contiguous copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CopyRun {
    /// Where to read.
    pub src: Place,
    /// Where to write.
    pub dst: Place,
    /// Number of bytes, at least 1.
    pub len: u64,
}

/// A proven plan; cheap to clone, shared by threads.
///
/// Whatever its constructors accept: both sides stay in their regions, every destination byte is
/// written at most once, and all units together are the whole.
///
/// ```
/// use std::ops::ControlFlow;
/// use pdkv_core::plan::Plan;
/// use pdkv_core::span::Span;
///
/// let (src, dst) = ([Span::new(0, 0, 4), Span::new(0, 4, 4)], [Span::new(0, 8, 4), Span::new(0, 12, 4)]);
/// let plan = Plan::spans(&src, &[8], &dst, &[16])?;
/// let mut runs = Vec::new();
/// let _ = plan.walk(0..plan.unit_count(), |run| {
///     runs.push((run.src.offset, run.dst.offset, run.len));
///     ControlFlow::Continue(())
/// });
/// assert_eq!(runs, [(0, 8, 8)]);
/// # Ok::<(), pdkv_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Plan(Arc<Proven>);

#[derive(Debug)]
struct Proven {
    kind: Kind,
    /// Bytes of the regions in which both sides stay: the source's, the destination's.
    region_bytes: [Arc<[u64]>; 2],
}

#[derive(Debug)]
enum Kind {
    Pages(Pages),
    Spans(SpanList),
}

impl Plan {
    /// Plans copying the selected layers of `src_blocks` onto `dst_blocks`, block by block.
    ///
    /// The layouts may differ in place and stride (NHD to HND, layer-compact to block-outermost),
    /// not in meaning. A source block may come twice, a destination block may not.
    ///
    /// # Errors
    /// `Layout` when the meanings differ, the tables have different lengths, a block or layer is
    /// out of range, or a destination block comes twice.
    pub fn pages(
        src: &KvLayout,
        src_blocks: &BlockTable,
        dst: &KvLayout,
        dst_blocks: &BlockTable,
        selection: &Selection,
    ) -> Result<Self> {
        Pairing::new(src, dst, selection)?.plan(src_blocks, dst_blocks)
    }

    /// Plans copying each source span onto the destination span at the same index.
    ///
    /// # Errors
    /// `Layout` when the lists or the lengths of a pair differ or two destinations overlap,
    /// `Region` when a span leaves its region.
    pub fn spans(src: &[Span], src_region_bytes: &[u64], dst: &[Span], dst_region_bytes: &[u64]) -> Result<Self> {
        let list = SpanList::new(src, src_region_bytes, dst, dst_region_bytes)?;
        Ok(Self(Arc::new(Proven {
            kind: Kind::Spans(list),
            region_bytes: [src_region_bytes.into(), dst_region_bytes.into()],
        })))
    }

    /// Bytes of the source's regions and of the destination's, which the plan does not leave: memory as large can be
    /// copied without looking at a place again.
    pub fn region_bytes(&self) -> [&[u64]; 2] {
        let [src, dst] = &self.0.region_bytes;
        [src, dst]
    }

    /// Number of units; any division of `0..unit_count()` into ranges covers the plan.
    pub fn unit_count(&self) -> u64 {
        match &self.0.kind {
            Kind::Pages(pages) => pages.unit_count(),
            Kind::Spans(list) => list.unit_count(),
        }
    }

    /// Bytes copied by all units.
    pub fn total_bytes(&self) -> u64 {
        match &self.0.kind {
            Kind::Pages(pages) => pages.total_bytes(),
            Kind::Spans(list) => list.total_bytes(),
        }
    }

    /// Contiguous copies that a walk over all units makes.
    pub fn run_count(&self) -> u64 {
        match &self.0.kind {
            Kind::Pages(pages) => pages.run_count(),
            Kind::Spans(list) => list.run_count(),
        }
    }

    /// Bytes this plan occupies.
    pub fn memory_bytes(&self) -> usize {
        let regions: usize = self.0.region_bytes.iter().map(|bytes| size_of_val(&**bytes)).sum();
        size_of::<Proven>()
            + regions
            + match &self.0.kind {
                Kind::Pages(pages) => pages.memory_bytes(),
                Kind::Spans(list) => list.memory_bytes(),
            }
    }

    /// Mean bytes of a unit, rounded up: how much work a range of units is.
    pub fn unit_bytes_hint(&self) -> u64 {
        self.total_bytes().div_ceil(self.unit_count().max(1))
    }

    /// Calls `f` with the copies of a range of units, neighbours merged; units past the end are
    /// none. Stops when `f` breaks. Does not allocate.
    #[inline]
    pub fn walk(&self, units: Range<u64>, f: impl FnMut(CopyRun) -> ControlFlow<()>) -> ControlFlow<()> {
        match &self.0.kind {
            Kind::Pages(pages) => pages.walk(units, f),
            Kind::Spans(list) => list.walk(units, f),
        }
    }

    /// What the plan is made of.
    pub fn explain(&self) -> Explanation {
        match &self.0.kind {
            Kind::Pages(pages) => pages.explain(self.memory_bytes()),
            Kind::Spans(list) => list.explain(self.memory_bytes()),
        }
    }
}
