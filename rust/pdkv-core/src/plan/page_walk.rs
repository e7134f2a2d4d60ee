//! One side of a two-sided transfer: the spans of its pages in an order both sides agree on.
//!
//! A unit is one index of the axes down to and including the block position; it has the same
//! number of bytes, in the same order, at the peer.

use std::ops::{ControlFlow, Range};

use super::segments::Segments;
use super::{Place, Selection, WireAxis, WireOrder, refuse};
use crate::Result;
use crate::block_table::BlockTable;
use crate::layout::{KvLayout, LayerLayout};
use crate::span::Span;

/// The spans of some blocks in wire order.
///
/// Two walks with equal meaning, table length, selection and order have the same units: unit `u`
/// here is the same bytes as unit `u` there.
#[derive(Debug)]
pub struct PageWalk {
    layout: KvLayout,
    first_layer: usize,
    segments: Segments<1>,
    /// The axes outside the block position, outermost first, with their counts.
    outer: Vec<(WireAxis, u64)>,
    /// The axes inside the block position that did not melt into the chunk.
    inner: Vec<(WireAxis, u64)>,
    chunk: u64,
    blocks_merge: bool,
    unit_bytes: u64,
    unit_count: u64,
}

/// Where a walk stands on the axes other than the block position.
#[derive(Clone, Copy, Default)]
struct Index {
    layer: usize,
    plane: usize,
    head: u64,
    token: u64,
}

impl Index {
    #[inline]
    fn set(&mut self, axis: WireAxis, value: u64) {
        match axis {
            WireAxis::Layer => self.layer = value as usize,
            WireAxis::Plane => self.plane = value as usize,
            WireAxis::Head => self.head = value,
            WireAxis::Token => self.token = value,
            WireAxis::Block => {}
        }
    }
}

impl PageWalk {
    /// The walk over `blocks` of a cache to read from; a block may come twice.
    ///
    /// # Errors
    /// `Layout` when a block or layer is out of range.
    pub fn new(layout: &KvLayout, blocks: &BlockTable, selection: &Selection, order: WireOrder) -> Result<Self> {
        selection.validate(layout)?;
        blocks.validate(layout.num_blocks())?;
        // A reader's table may be longer than the cache, so the layout's own bound isn't enough.
        (layout.layer_block_bytes() * u64::from(selection.num_layers))
            .checked_mul(blocks.len() as u64)
            .ok_or_else(|| refuse("the walk is beyond 64 bits"))?;
        let layers = &layout.layers()[selection.first_layer as usize..][..selection.num_layers as usize];
        let count = |axis: WireAxis| match axis {
            WireAxis::Layer => layers.len() as u64,
            WireAxis::Plane => u64::from(layout.num_planes()),
            WireAxis::Block => blocks.len() as u64,
            WireAxis::Head => u64::from(layout.num_heads()),
            WireAxis::Token => u64::from(layout.token_rows()),
        };
        let counted = |axes: &[WireAxis]| axes.iter().map(|&axis| (axis, count(axis))).collect::<Vec<_>>();
        let split = order
            .axes()
            .iter()
            .position(|&axis| axis == WireAxis::Block)
            .unwrap_or(0);
        let outer = counted(&order.axes()[..split]);
        let mut inner = counted(&order.axes()[split + 1..]);
        let product = |axes: &[(WireAxis, u64)]| axes.iter().map(|&(_, count)| count).product::<u64>();
        let unit_bytes = layout.content_bytes() * product(&inner);
        let unit_count = product(&outer) * blocks.len() as u64;
        let mut chunk = layout.content_bytes();
        inner.retain(|&(_, count)| count > 1);
        while let Some(&(axis, count)) = inner.last() {
            if !continues(layers, axis, chunk) {
                break;
            }
            chunk *= count;
            inner.pop();
        }
        let blocks_merge = inner.is_empty() && layers.iter().all(|layer| layer.block_stride == chunk);
        Ok(Self {
            layout: layout.clone(),
            first_layer: selection.first_layer as usize,
            segments: Segments::of(blocks)?,
            outer,
            inner,
            chunk,
            blocks_merge,
            unit_bytes,
            unit_count,
        })
    }

    /// The walk over `blocks` of a cache to write to.
    ///
    /// # Errors
    /// `Layout` as [`PageWalk::new`], or when a block comes twice.
    pub fn scatter(layout: &KvLayout, blocks: &BlockTable, selection: &Selection, order: WireOrder) -> Result<Self> {
        blocks.check_unique(layout.num_blocks())?;
        Self::new(layout, blocks, selection, order)
    }

    /// Number of units.
    pub fn unit_count(&self) -> u64 {
        self.unit_count
    }

    /// Bytes of every unit.
    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// Bytes of all units.
    pub fn total_bytes(&self) -> u64 {
        self.unit_count * self.unit_bytes
    }

    /// Bytes this walk occupies, the layout it shares not counted.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.segments.memory_bytes()
            + (self.outer.capacity() + self.inner.capacity()) * size_of::<(WireAxis, u64)>()
    }

    /// Calls `f` with the spans of a range of units in wire order, neighbours merged; units past
    /// the end are none. Stops when `f` breaks. Does not allocate.
    #[inline]
    pub fn walk(&self, units: Range<u64>, mut f: impl FnMut(Span) -> ControlFlow<()>) -> ControlFlow<()> {
        let positions = u64::from(self.segments.positions());
        let end = units.end.min(self.unit_count);
        let mut unit = units.start;
        while unit < end {
            let position = unit % positions;
            let count = (positions - position).min(end - unit);
            let mut index = Index::default();
            let mut rest = unit / positions;
            for &(axis, count) in self.outer.iter().rev() {
                index.set(axis, rest % count);
                rest /= count;
            }
            for ([block], len) in self.segments.range(position as u32, count as u32) {
                self.walk_blocks(index, block, len, &mut f)?;
            }
            unit += count;
        }
        ControlFlow::Continue(())
    }

    /// `len` neighbouring blocks with one index of the outer axes.
    #[inline]
    fn walk_blocks(
        &self,
        mut index: Index,
        block: u32,
        len: u32,
        f: &mut impl FnMut(Span) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        if !self.inner.is_empty() {
            for block in (block..).take(len as usize) {
                self.walk_inner(&self.inner, &mut index, block, f)?;
            }
            return ControlFlow::Continue(());
        }
        let stride = self.layer(index.layer).block_stride;
        let place = self.place(index, block);
        if self.blocks_merge {
            return f(Span::new(place.region, place.offset, self.chunk * u64::from(len)));
        }
        for step in 0..u64::from(len) {
            f(Span::new(place.region, place.offset + step * stride, self.chunk))?;
        }
        ControlFlow::Continue(())
    }

    /// One block, along the inner axes from `axes` on.
    fn walk_inner(
        &self,
        axes: &[(WireAxis, u64)],
        index: &mut Index,
        block: u32,
        f: &mut impl FnMut(Span) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let Some((&(axis, count), deeper)) = axes.split_first() else {
            let place = self.place(*index, block);
            return f(Span::new(place.region, place.offset, self.chunk));
        };
        let layer = self.layer(index.layer);
        let stride = match axis {
            WireAxis::Head => layer.head_stride,
            WireAxis::Token => layer.token_stride,
            _ => 0,
        };
        if deeper.is_empty() && stride > 0 {
            index.set(axis, 0);
            let place = self.place(*index, block);
            for step in 0..count {
                f(Span::new(place.region, place.offset + step * stride, self.chunk))?;
            }
            return ControlFlow::Continue(());
        }
        for value in 0..count {
            index.set(axis, value);
            self.walk_inner(deeper, index, block, f)?;
        }
        ControlFlow::Continue(())
    }

    #[inline]
    fn layer(&self, layer: usize) -> &LayerLayout {
        &self.layout.layers()[self.first_layer + layer]
    }

    #[inline]
    fn place(&self, index: Index, block: u32) -> Place {
        let layer = self.layer(index.layer);
        let plane = layer.planes[index.plane];
        let within =
            u64::from(block) * layer.block_stride + index.head * layer.head_stride + index.token * layer.token_stride;
        Place {
            region: plane.region,
            offset: plane.offset + within,
        }
    }
}

/// Whether a step along `axis` is `chunk` bytes everywhere.
fn continues(layers: &[LayerLayout], axis: WireAxis, chunk: u64) -> bool {
    let first = &layers[0];
    match axis {
        WireAxis::Head => layers.iter().all(|layer| layer.head_stride == chunk),
        WireAxis::Token => layers.iter().all(|layer| layer.token_stride == chunk),
        WireAxis::Plane => layers.iter().all(|layer| {
            let [k, v] = layer.planes[..] else { return false };
            k.region == v.region && k.offset.checked_add(chunk) == Some(v.offset)
        }),
        // Beyond this axis the strides of the first layer stand for all.
        WireAxis::Layer => layers.windows(2).all(|pair| {
            pair[1].block_stride == first.block_stride
                && pair[1].head_stride == first.head_stride
                && pair[1].token_stride == first.token_stride
                && pair[0]
                    .planes
                    .iter()
                    .zip(&pair[1].planes)
                    .all(|(from, to)| from.region == to.region && from.offset.checked_add(chunk) == Some(to.offset))
        }),
        WireAxis::Block => false,
    }
}
