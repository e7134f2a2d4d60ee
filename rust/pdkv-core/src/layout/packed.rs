//! The layout of pages packed one behind the other, in a wire order: a stream, seen as a cache.
//!
//! Packing pages is then a plan from a cache onto this layout, unpacking one back, and both ends of a stream that agree on the
//! order agree on every offset.

use super::{KvLayout, KvLayoutParts, LayerLayout, Plane, refuse};
use crate::Result;
use crate::plan::{WireAxis, WireOrder};

impl KvLayout {
    /// The layout of `positions` blocks, packed into one region in `order`. Block `p` of it is position `p` of the block table.
    ///
    /// # Errors
    /// `Layout` when there is no block, or the region would be beyond 64 bits.
    pub fn packed(&self, positions: u32, order: WireOrder) -> Result<Self> {
        let count = |axis: WireAxis| match axis {
            WireAxis::Layer => u64::from(self.num_layers()),
            WireAxis::Plane => u64::from(self.num_planes()),
            WireAxis::Block => u64::from(positions),
            WireAxis::Head => u64::from(self.num_heads()),
            WireAxis::Token => u64::from(self.token_rows()),
        };
        let mut strides = [0; 5];
        let mut span = self.content_bytes();
        for &axis in order.axes().iter().rev() {
            strides[axis as usize] = if count(axis) == 1 { 0 } else { span };
            span = span
                .checked_mul(count(axis))
                .ok_or_else(|| refuse("the packed pages are beyond 64 bits"))?;
        }
        let stride = |axis: WireAxis| strides[axis as usize];
        let layer = |index: u64| LayerLayout {
            planes: (0..u64::from(self.num_planes()))
                .map(|plane| Plane {
                    region: 0,
                    offset: index * stride(WireAxis::Layer) + plane * stride(WireAxis::Plane),
                })
                .collect(),
            block_stride: stride(WireAxis::Block),
            head_stride: stride(WireAxis::Head),
            token_stride: stride(WireAxis::Token),
        };
        Self::from_parts(KvLayoutParts {
            dtype: self.dtype(),
            num_blocks: positions,
            num_heads: self.num_heads(),
            block_tokens: self.block_tokens(),
            token_rows: self.token_rows(),
            content_bytes: self.content_bytes(),
            layers: (0..u64::from(self.num_layers())).map(layer).collect(),
            layer_names: self.layer_names().to_vec(),
            region_bytes: vec![span],
        })
    }
}
