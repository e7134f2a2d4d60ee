//! Tiny caches placed in every way, as tensors for the code under test and as one formula for the oracle.

use pdkv_core::block_table::BlockTable;
use pdkv_core::dtype::DType;
use pdkv_core::layout::{LayerTensors, LayoutRequest, Resolved, TensorFacts};
use proptest::prelude::*;

/// Axis numbers: layer, plane, block, head, token.
pub(crate) type Order = [usize; 5];

/// What two caches of one test have in common.
#[derive(Clone, Debug)]
pub(crate) struct Counts {
    pub(crate) layers: u64,
    pub(crate) planes: u64,
    pub(crate) heads: u64,
    pub(crate) tokens: u64,
    /// Elements of two bytes.
    pub(crate) content: u64,
}

/// Where one cache puts its bytes.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    pub(crate) blocks: u64,
    /// Axes of the memory, outermost first.
    pub(crate) memory: Order,
    /// Bytes left free inside each level of `memory`, innermost last.
    pub(crate) pads: [u64; 5],
    /// Every layer in an allocation of its own, in descending order of addresses.
    pub(crate) layers_apart: bool,
    /// K and V as two tensors instead of one with a `K` axis.
    pub(crate) split: bool,
    /// Order of the axes in the tensor's shape.
    pub(crate) shape: Order,
}

/// A cache with the address of every byte.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    counts: Counts,
    placement: Placement,
    strides: [u64; 5],
    pub(crate) resolved: Resolved,
}

const BASE: u64 = 1 << 20;
const APART: u64 = 1 << 55;

impl Placement {
    /// Contiguous memory in the given order of axes.
    pub(crate) fn dense(blocks: u64, memory: Order) -> Self {
        Self {
            blocks,
            memory,
            pads: [0; 5],
            layers_apart: false,
            split: false,
            shape: [0, 1, 2, 3, 4],
        }
    }
}

impl Cache {
    pub(crate) fn new(counts: &Counts, placement: &Placement) -> Self {
        let sizes = counts.sizes(placement.blocks);
        let mut strides = [0; 5];
        let mut span = counts.content * 2;
        for (&axis, pad) in placement.memory.iter().zip(placement.pads).rev() {
            if axis == 0 && placement.layers_apart {
                strides[axis] = APART;
                continue;
            }
            strides[axis] = span + pad;
            span += (sizes[axis] - 1) * strides[axis];
        }
        let mut cache = Self {
            counts: counts.clone(),
            placement: placement.clone(),
            strides,
            resolved: Resolved {
                layout: LayoutRequest::parse("BC", 1)
                    .unwrap()
                    .resolve(&[any_tensor()])
                    .unwrap()
                    .layout,
                regions: Vec::new(),
            },
        };
        cache.resolved = cache.resolve();
        cache
    }

    /// The address of a byte, given layer, plane, block, head and token.
    pub(crate) fn address(&self, index: [u64; 5], byte: u64) -> u64 {
        let mut index = index;
        if self.placement.layers_apart {
            index[0] = self.counts.layers - 1 - index[0];
        }
        BASE + byte
            + index
                .iter()
                .zip(self.strides)
                .map(|(index, stride)| index * stride)
                .sum::<u64>()
    }

    /// The address of a byte in a region of the layout.
    pub(crate) fn region_address(&self, region: u32, offset: u64) -> u64 {
        self.resolved.regions[region as usize].0 + offset
    }

    fn resolve(&self) -> Resolved {
        let mut letters = String::new();
        let mut axes = Vec::new();
        let split = self.placement.split && self.counts.planes == 2;
        for &axis in &self.placement.shape {
            let present = match axis {
                0 => false,
                1 => !split && self.counts.planes == 2,
                3 => self.counts.heads > 1,
                _ => true,
            };
            if present {
                letters.push(b"LKBHN"[axis] as char);
                axes.push(axis);
            }
        }
        letters.push('C');
        let sizes = self.counts.sizes(self.placement.blocks);
        let facts = |layer: u64, plane: u64| TensorFacts {
            name: format!("layers.{layer}"),
            address: self.address([layer, plane, 0, 0, 0], 0),
            shape: axes
                .iter()
                .map(|&axis| sizes[axis])
                .chain([self.counts.content])
                .collect(),
            strides_bytes: axes
                .iter()
                .map(|&axis| self.strides[axis].cast_signed())
                .chain([2])
                .collect(),
            item_bytes: 2,
            dtype: DType::BF16,
        };
        let tensors: Vec<_> = (0..self.counts.layers)
            .map(|layer| {
                if split {
                    LayerTensors::Split {
                        k: facts(layer, 0),
                        v: facts(layer, 1),
                    }
                } else {
                    LayerTensors::Joined(facts(layer, 0))
                }
            })
            .collect();
        LayoutRequest::parse(&letters, self.counts.tokens as u32)
            .unwrap()
            .resolve(&tensors)
            .unwrap()
    }
}

fn any_tensor() -> LayerTensors {
    LayerTensors::Joined(TensorFacts {
        name: String::new(),
        address: BASE,
        shape: vec![1, 1],
        strides_bytes: vec![1, 1],
        item_bytes: 1,
        dtype: DType::Raw,
    })
}

impl Counts {
    pub(crate) fn sizes(&self, blocks: u64) -> [u64; 5] {
        [self.layers, self.planes, blocks, self.heads, self.tokens]
    }
}

pub(crate) fn counts() -> impl Strategy<Value = Counts> {
    (1_u64..4, 1_u64..3, 1_u64..4, 1_u64..4, 1_u64..4).prop_map(|(layers, planes, heads, tokens, content)| Counts {
        layers,
        planes,
        heads,
        tokens,
        content,
    })
}

pub(crate) fn placement() -> impl Strategy<Value = Placement> {
    let pad = || prop_oneof![6 => Just(0_u64), 1 => 1_u64..40, 1 => Just(1_u64 << 33)];
    let order = || Just([0_usize, 1, 2, 3, 4]).prop_shuffle();
    (
        1_u64..8,
        order(),
        [pad(), pad(), pad(), pad(), pad()],
        any::<bool>(),
        any::<bool>(),
        order(),
    )
        .prop_map(|(blocks, memory, pads, layers_apart, split, shape)| Placement {
            blocks,
            memory,
            pads,
            layers_apart,
            split,
            shape,
        })
}

/// A table of source ids, any, and one of destination ids, each once, of one length.
pub(crate) fn tables(src_blocks: u64, dst_blocks: u64) -> impl Strategy<Value = (Vec<u32>, Vec<u32>)> {
    let ids: Vec<u32> = (0..dst_blocks as u32).collect();
    let targets = prop_oneof![
        prop::sample::subsequence(ids.clone(), 0..=ids.len()),
        prop::sample::subsequence(ids.clone(), 0..=ids.len()).prop_shuffle(),
    ];
    targets.prop_flat_map(move |targets| {
        let len = targets.len();
        let ascending = (0..src_blocks as u32).cycle();
        let sources = prop_oneof![
            (0..src_blocks as usize).prop_map(move |first| ascending.clone().skip(first).take(len).collect::<Vec<_>>()),
            prop::collection::vec(0..src_blocks as u32, len),
        ];
        (sources, Just(targets))
    })
}

pub(crate) fn table(ids: &[u32]) -> BlockTable {
    BlockTable::from_ids(ids)
}
