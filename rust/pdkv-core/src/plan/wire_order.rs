//! In which order two-sided transports put bytes on a stream.
//!
//! An order is a permutation of the five axes; the content of one (layer, plane, block, head,
//! token) is contiguous and innermost. Both ends walk their own pages in the same order, so a
//! stream needs no addresses and no lengths.

use super::refuse;
use crate::Result;
use crate::layout::{KvLayout, LayerLayout};

/// An axis of the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WireAxis {
    /// Layers.
    Layer = 0,
    /// Key, then value.
    Plane = 1,
    /// Positions in the block table.
    Block = 2,
    /// Heads.
    Head = 3,
    /// Token rows.
    Token = 4,
}

impl WireAxis {
    const ALL: [Self; 5] = [Self::Layer, Self::Plane, Self::Block, Self::Head, Self::Token];
}

/// The five axes, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WireOrder([WireAxis; 5]);

impl WireOrder {
    /// Layer by layer, block by block, in the block plane, head, token.
    pub const LAYER_MAJOR: Self = Self(WireAxis::ALL);

    /// Block by block, in the block layer, plane, head, token.
    pub const BLOCK_MAJOR: Self = Self([
        WireAxis::Block,
        WireAxis::Layer,
        WireAxis::Plane,
        WireAxis::Head,
        WireAxis::Token,
    ]);

    /// An order of all five axes.
    ///
    /// # Errors
    /// `Layout` when an axis comes twice.
    pub fn new(axes: [WireAxis; 5]) -> Result<Self> {
        if WireAxis::ALL.iter().any(|axis| !axes.contains(axis)) {
            return Err(refuse(format!("`{axes:?}` is not an order of five axes")));
        }
        Ok(Self(axes))
    }

    /// The order in which the bytes lie in a layout's memory, axes with one element first.
    pub fn natural(layout: &KvLayout) -> Self {
        let layers = layout.layers();
        let first = &layers[0];
        let key = |axis: WireAxis| match axis {
            WireAxis::Layer if layers.len() > 1 => step(layers),
            WireAxis::Plane if layout.num_planes() > 1 => step_in_pairs(layers),
            WireAxis::Block if layout.num_blocks() > 1 => first.block_stride,
            WireAxis::Head if layout.num_heads() > 1 => first.head_stride,
            WireAxis::Token if layout.token_rows() > 1 => first.token_stride,
            _ => u64::MAX,
        };
        let mut axes = WireAxis::ALL;
        axes.sort_by_key(|&axis| std::cmp::Reverse(key(axis)));
        Self(axes)
    }

    /// The axes, outermost first.
    pub const fn axes(&self) -> &[WireAxis; 5] {
        &self.0
    }

    /// The code on the wire: three bits an axis, the outermost lowest.
    pub fn code(&self) -> u32 {
        self.0
            .iter()
            .rev()
            .fold(0, |code, &axis| code << 3 | u32::from(axis as u8))
    }

    /// The order of a code read from the wire.
    ///
    /// # Errors
    /// `Layout` when the code is not an order of five axes.
    pub fn from_code(code: u32) -> Result<Self> {
        let mut axes = WireAxis::ALL;
        let mut rest = code;
        for axis in &mut axes {
            *axis = *WireAxis::ALL
                .get((rest & 7) as usize)
                .ok_or_else(|| refuse(format!("wire order `{code}` has an unknown axis")))?;
            rest >>= 3;
        }
        if rest != 0 {
            return Err(refuse(format!("wire order `{code}` has more than five axes")));
        }
        Self::new(axes)
    }
}

/// The distance from each layer to the next if it is one positive distance, else `u64::MAX`.
fn step(layers: &[LayerLayout]) -> u64 {
    let mut steps = layers.windows(2).map(|pair| {
        let (from, to) = (pair[0].planes[0], pair[1].planes[0]);
        to.offset.checked_sub(from.offset).filter(|_| from.region == to.region)
    });
    let first = steps.next().flatten();
    match first {
        Some(distance) if steps.all(|next| next == first) => distance,
        _ => u64::MAX,
    }
}

/// The distance from each K plane to its V plane if it is one positive distance, else `u64::MAX`.
fn step_in_pairs(layers: &[LayerLayout]) -> u64 {
    let mut steps = layers.iter().map(|layer| match layer.planes[..] {
        [k, v] if k.region == v.region => v.offset.checked_sub(k.offset),
        _ => None,
    });
    let first = steps.next().flatten();
    match first {
        Some(distance) if steps.all(|next| next == first) => distance,
        _ => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_come_back_and_garbage_is_refused() {
        for order in [WireOrder::LAYER_MAJOR, WireOrder::BLOCK_MAJOR] {
            assert_eq!(WireOrder::from_code(order.code()).unwrap(), order);
        }
        let mut valid = 0;
        for code in 0..1 << 16 {
            if let Ok(order) = WireOrder::from_code(code) {
                assert_eq!(order.code(), code);
                valid += 1;
            }
        }
        assert_eq!(valid, 120);
        assert!(WireOrder::from_code(u32::MAX).is_err());
    }
}
