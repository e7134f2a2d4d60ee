//! Lanes: pairs of planes, with the shape of one block between them reduced to its essentials.
//!
//! Axes that are contiguous on both sides melt into the chunk; lanes whose chunks follow one
//! another on both sides melt into one lane. A block-outermost cache with equal order on both
//! sides ends as a single lane whose chunk is the whole block.

use super::Place;
use crate::layout::{KvLayout, LayerLayout};

/// An axis that stays strided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Dim {
    pub(super) count: u64,
    pub(super) src_stride: u64,
    pub(super) dst_stride: u64,
}

/// One block of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Bytes contiguous on both sides.
    pub(super) chunk: u64,
    /// Strides from block to block.
    pub(super) block: Dim,
    /// Whether neighbouring blocks continue each chunk on both sides.
    pub(super) blocks_merge: bool,
    /// The strided axes, outer first; the first `num_dims` are used.
    pub(super) dims: [Dim; 2],
    pub(super) num_dims: usize,
}

/// One source plane and the destination plane it fills.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub(super) src: Place,
    pub(super) dst: Place,
    pub(super) shape: u32,
}

/// The lanes of some layers and the distinct shapes they refer to.
#[derive(Debug)]
pub(super) struct Lanes {
    pub(super) list: Box<[Lane]>,
    pub(super) shapes: Vec<Shape>,
}

impl Lanes {
    /// The lanes of layers `first..first + count`; the layouts have equal meanings.
    pub(super) fn new(src: &KvLayout, dst: &KvLayout, first: u32, count: u32) -> Self {
        let mut shapes: Vec<Shape> = Vec::new();
        let mut list = Vec::with_capacity(count as usize * src.num_planes() as usize);
        let layers = first as usize..(first + count) as usize;
        for (from, to) in src.layers()[layers.clone()].iter().zip(&dst.layers()[layers]) {
            let shape = Shape::between(src, from, to);
            let index = shapes.iter().position(|known| *known == shape).unwrap_or_else(|| {
                shapes.push(shape);
                shapes.len() - 1
            });
            for (from, to) in from.planes.iter().zip(&to.planes) {
                list.push(Lane {
                    src: Place {
                        region: from.region,
                        offset: from.offset,
                    },
                    dst: Place {
                        region: to.region,
                        offset: to.offset,
                    },
                    shape: index as u32,
                });
            }
        }
        if let [shape] = &mut shapes[..] {
            melt(&mut list, shape);
        }
        Self {
            list: list.into_boxed_slice(),
            shapes,
        }
    }

    /// The shape of a lane.
    #[inline]
    pub(super) fn shape(&self, lane: &Lane) -> &Shape {
        &self.shapes[lane.shape as usize]
    }

    /// Bytes on the heap.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.list) + self.shapes.capacity() * size_of::<Shape>()
    }
}

/// Melts lanes of one shape into one another as long as that makes them fewer.
fn melt(list: &mut Vec<Lane>, shape: &mut Shape) {
    while list.len() > 1 {
        let mut sorted = list.clone();
        sorted.sort_unstable_by_key(|lane| lane.dst);
        // All lanes must melt in groups of one size, or they would no longer have one shape.
        let follows = |pair: &[Lane]| {
            pair[0].src.plus(shape.chunk) == pair[1].src && pair[0].dst.plus(shape.chunk) == pair[1].dst
        };
        let group = 1 + sorted.windows(2).take_while(|pair| follows(pair)).count();
        if group == 1
            || !sorted.len().is_multiple_of(group)
            || !sorted.chunks_exact(group).all(|lanes| lanes.windows(2).all(follows))
        {
            return;
        }
        *list = sorted.into_iter().step_by(group).collect();
        shape.chunk *= group as u64;
        shape.reduce();
    }
}

impl Shape {
    fn between(layout: &KvLayout, src: &LayerLayout, dst: &LayerLayout) -> Self {
        let dim = |count: u32, src_stride: u64, dst_stride: u64| match count {
            1 => Dim {
                count: 1,
                ..Dim::default()
            },
            _ => Dim {
                count: u64::from(count),
                src_stride,
                dst_stride,
            },
        };
        let mut dims = [
            dim(layout.num_heads(), src.head_stride, dst.head_stride),
            dim(layout.token_rows(), src.token_stride, dst.token_stride),
        ];
        // Ascending destination addresses inside a block: writes stream better than reads need to.
        dims.sort_unstable_by_key(|dim| std::cmp::Reverse(dim.dst_stride));
        let mut shape = Self {
            chunk: layout.content_bytes(),
            block: Dim {
                count: 0,
                src_stride: src.block_stride,
                dst_stride: dst.block_stride,
            },
            blocks_merge: false,
            dims,
            num_dims: 2,
        };
        shape.reduce();
        shape
    }

    /// Moves axes that continue the chunk on both sides into it.
    fn reduce(&mut self) {
        let mut index = 0;
        while index < self.num_dims {
            let dim = self.dims[index];
            if dim.count == 1 || (dim.src_stride == self.chunk && dim.dst_stride == self.chunk) {
                self.chunk *= dim.count;
                self.dims.copy_within(index + 1..self.num_dims, index);
                self.num_dims -= 1;
                self.dims[self.num_dims] = Dim::default();
                index = 0;
            } else {
                index += 1;
            }
        }
        self.blocks_merge = self.block.src_stride == self.chunk && self.block.dst_stride == self.chunk;
    }

    /// Strided pieces in one block.
    pub(super) fn pieces(&self) -> u64 {
        self.dims[..self.num_dims].iter().map(|dim| dim.count).product()
    }
}
