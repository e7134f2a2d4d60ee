//! The proof that a layout fits its regions and that no two of its pieces share a byte.
//!
//! A plane is a set of pieces `offset + Σ index·stride`. Sorted by stride, each stride must be at
//! least the span of everything inside it; then every byte belongs to one index at most, and the
//! question whether two planes meet has at most two candidates per axis.

use super::{KvLayoutParts, LayerLayout, refuse};
use crate::Result;

/// An axis with more than one element.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Dim {
    count: i64,
    stride: i64,
}

/// The pieces of one plane, relative to its offset. Sizes fit `i64`: they are below the region's.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Footprint {
    /// By ascending stride; unused ones have count 1.
    dims: [Dim; 3],
    content: i64,
    /// Bytes from the first to one past the last.
    span: i64,
    block_stride: i64,
    /// Span of one block.
    block_span: i64,
}

struct Lane {
    region: u32,
    offset: i64,
    footprint: usize,
    layer: usize,
}

/// Checks places: inside the regions, and disjoint.
pub(super) fn check(parts: &KvLayoutParts) -> Result<()> {
    if let Some(bytes) = parts.region_bytes.iter().find(|&&bytes| i64::try_from(bytes).is_err()) {
        return Err(refuse(format!("a region of `{bytes}` bytes is beyond 63 bits")));
    }
    let mut footprints: Vec<Footprint> = Vec::new();
    let mut lanes = Vec::new();
    for (index, layer) in parts.layers.iter().enumerate() {
        let name = &parts.layer_names[index];
        let footprint = Footprint::new(parts, layer, name)?;
        if footprints.last() != Some(&footprint) {
            footprints.push(footprint);
        }
        for plane in &layer.planes {
            let Some(&bound) = parts.region_bytes.get(plane.region as usize) else {
                return Err(refuse(format!(
                    "layer `{name}` lies in region `{}` of `{}`",
                    plane.region,
                    parts.region_bytes.len()
                )));
            };
            if plane
                .offset
                .checked_add(footprint.span.cast_unsigned())
                .is_none_or(|end| end > bound)
            {
                return Err(refuse(format!(
                    "layer `{name}` needs `{}` bytes from offset `{}` of region `{}`, which has `{bound}`",
                    footprint.span, plane.offset, plane.region
                )));
            }
            lanes.push(Lane {
                region: plane.region,
                offset: plane.offset.cast_signed(),
                footprint: footprints.len() - 1,
                layer: index,
            });
        }
    }
    lanes.sort_unstable_by_key(|lane| (lane.region, lane.offset));
    for (position, first) in lanes.iter().enumerate() {
        let end = first.offset + footprints[first.footprint].span;
        for second in &lanes[position + 1..] {
            if second.region != first.region || second.offset >= end {
                break;
            }
            let (one, two) = (&footprints[first.footprint], &footprints[second.footprint]);
            if !one.misses(two, second.offset - first.offset) {
                return Err(refuse(format!(
                    "layers `{}` and `{}` share bytes of region `{}`, or can't be proven not to",
                    parts.layer_names[first.layer.min(second.layer)],
                    parts.layer_names[first.layer.max(second.layer)],
                    first.region
                ))
                .with_hint("leave out layers that reuse the cache of another layer"));
            }
        }
    }
    Ok(())
}

impl Footprint {
    fn new(parts: &KvLayoutParts, layer: &LayerLayout, name: &str) -> Result<Self> {
        let sized = |count: u32, stride: u64, what: &str| {
            let stride = if count == 1 { 0 } else { stride };
            i64::try_from(stride)
                .map(|stride| Dim {
                    count: i64::from(count),
                    stride,
                })
                .map_err(|_| {
                    refuse(format!(
                        "layer `{name}` has a {what} stride of `{stride}`, beyond 63 bits"
                    ))
                })
        };
        let content = i64::try_from(parts.content_bytes)
            .map_err(|_| refuse(format!("content of `{}` bytes is beyond 63 bits", parts.content_bytes)))?;
        let block = sized(parts.num_blocks, layer.block_stride, "block")?;
        let head = sized(parts.num_heads, layer.head_stride, "head")?;
        let token = sized(parts.token_rows, layer.token_stride, "token")?;
        let mut dims = [block, head, token];
        dims.sort_unstable_by_key(|dim| dim.stride);
        let grow = |span: i64, dim: Dim| {
            (dim.count - 1)
                .checked_mul(dim.stride)
                .and_then(|more| span.checked_add(more))
                .ok_or_else(|| refuse(format!("layer `{name}` ends beyond 63 bits")))
        };
        let mut span = content;
        for dim in dims {
            if dim.count > 1 && dim.stride < span {
                return Err(refuse(format!(
                    "layer `{name}` overlaps itself: a stride of `{}` bytes over pieces of `{span}` bytes",
                    dim.stride
                ))
                .with_hint(
                    "broadcast and interleaved views can't hold a cache; pass the tensor the engine allocated",
                ));
            }
            span = grow(span, dim)?;
        }
        let block_span = grow(grow(content, head)?, token)?;
        Ok(Self {
            dims,
            content,
            span,
            block_stride: block.stride,
            block_span,
        })
    }

    /// Whether the pieces of `other`, `distance` bytes further, share no byte with these.
    fn misses(&self, other: &Self, distance: i64) -> bool {
        if self == other {
            return !self.meets_copy(distance, self.dims.len());
        }
        // Unlike inside a block: compare whole blocks, which is enough for packed pages. The extents
        // intersect, so a step beyond the last block can't be the only one that meets.
        let stride = self.block_stride;
        if stride == 0 || stride != other.block_stride || self.block_span > stride || other.block_span > stride {
            return false;
        }
        let apart = |steps: i64| {
            let rest = distance - steps * stride;
            rest >= self.block_span || -rest >= other.block_span
        };
        let steps = distance.div_euclid(stride);
        apart(steps) && apart(steps + 1)
    }

    /// Whether two pieces `distance` apart can meet when the first `axes` dims may differ.
    fn meets_copy(&self, distance: i64, axes: usize) -> bool {
        let Some(dim) = axes.checked_sub(1).map(|last| self.dims[last]) else {
            return distance.abs() < self.content;
        };
        if dim.count == 1 {
            return self.meets_copy(distance, axes - 1);
        }
        let steps = distance.div_euclid(dim.stride);
        [steps, steps + 1]
            .into_iter()
            .filter(|steps| steps.abs() < dim.count)
            .any(|steps| self.meets_copy(distance - steps * dim.stride, axes - 1))
    }
}

#[cfg(test)]
#[path = "disjoint_tests.rs"]
mod tests;
