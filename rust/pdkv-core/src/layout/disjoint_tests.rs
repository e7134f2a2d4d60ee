//! The proof against counting bytes.

use proptest::prelude::*;

use super::super::{KvLayout, KvLayoutParts, LayerLayout, Plane};
use crate::dtype::DType;

fn parts(layers: Vec<LayerLayout>, counts: [u32; 3], content: u64, bytes: u64) -> KvLayoutParts {
    KvLayoutParts {
        dtype: DType::Raw,
        num_blocks: counts[0],
        num_heads: counts[1],
        block_tokens: counts[2],
        token_rows: counts[2],
        content_bytes: content,
        layer_names: (0..layers.len()).map(|layer| format!("layers.{layer}")).collect(),
        layers,
        region_bytes: vec![bytes],
    }
}

fn layer(offset: u64, strides: [u64; 3]) -> LayerLayout {
    LayerLayout {
        planes: vec![Plane { region: 0, offset }],
        block_stride: strides[0],
        head_stride: strides[1],
        token_stride: strides[2],
    }
}

/// How many pieces cover each byte of the one region.
fn cover(parts: &KvLayoutParts) -> Vec<u32> {
    let mut counts = vec![0; parts.region_bytes[0] as usize];
    for layer in &parts.layers {
        for block in 0..u64::from(parts.num_blocks) {
            for head in 0..u64::from(parts.num_heads) {
                for token in 0..u64::from(parts.token_rows) {
                    let at = layer.planes[0].offset
                        + block * layer.block_stride
                        + head * layer.head_stride
                        + token * layer.token_stride;
                    for byte in at..at + parts.content_bytes {
                        counts[byte as usize] += 1;
                    }
                }
            }
        }
    }
    counts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// With equal strides the proof is exact as long as each plane alone is nested.
    #[test]
    fn two_planes_meet_exactly_when_bytes_do(
        counts in [1_u32..4, 1_u32..4, 1_u32..4],
        content in 1_u64..4,
        pads in [0_u64..3, 0_u64..3, 0_u64..8],
        order in Just([0_usize, 1, 2]).prop_shuffle(),
        distance in 0_u64..60,
    ) {
        let mut strides = [0; 3];
        let mut span = content;
        for (&axis, pad) in order.iter().zip(pads) {
            strides[axis] = span + pad;
            span += u64::from(counts[axis] - 1) * strides[axis];
        }
        let one = parts(vec![layer(0, strides)], counts, content, 1000);
        prop_assert!(cover(&one).iter().all(|&count| count <= 1));
        prop_assert!(KvLayout::from_parts(one).is_ok());
        let two = parts(vec![layer(distance, strides), layer(0, strides)], counts, content, 1000);
        let disjoint = cover(&two).iter().all(|&count| count <= 1);
        prop_assert_eq!(KvLayout::from_parts(two).is_ok(), disjoint);
    }

    /// Whatever the numbers, an accepted layout is disjoint.
    #[test]
    fn an_accepted_layout_is_disjoint(
        counts in [1_u32..4, 1_u32..4, 1_u32..4],
        content in 1_u64..5,
        first in [0_u64..30, 0_u64..30, 0_u64..30],
        second in [0_u64..30, 0_u64..30, 0_u64..30],
        block_stride in prop::option::of(0_u64..30),
        distance in 0_u64..60,
    ) {
        let (mut first, mut second) = (first, second);
        if let Some(stride) = block_stride {
            first[0] = stride;
            second[0] = stride;
        }
        let both = parts(vec![layer(0, first), layer(distance, second)], counts, content, 1000);
        let covered = cover(&both);
        if KvLayout::from_parts(both).is_ok() {
            prop_assert!(covered.iter().all(|&count| count <= 1));
        }
    }
}

#[test]
fn packed_pages_with_unlike_layers_are_accepted() {
    // Pages of 64 bytes: one layer has heads outside, the other tokens.
    let layers = vec![layer(0, [64, 8, 4]), layer(32, [64, 4, 8])];
    assert!(KvLayout::from_parts(parts(layers, [4, 2, 2], 4, 256)).is_ok());
}

#[test]
fn places_outside_a_region_are_refused() {
    let good = parts(vec![layer(8, [16, 8, 4])], [2, 2, 2], 4, 40);
    assert!(KvLayout::from_parts(good.clone()).is_ok());
    for bad in [
        KvLayoutParts {
            region_bytes: vec![39],
            ..good.clone()
        },
        KvLayoutParts {
            region_bytes: vec![],
            ..good.clone()
        },
        KvLayoutParts {
            region_bytes: vec![u64::MAX],
            ..good.clone()
        },
        KvLayoutParts {
            layers: vec![layer(u64::MAX, [16, 8, 4])],
            ..good.clone()
        },
        KvLayoutParts {
            layers: vec![layer(8, [u64::MAX, 8, 4])],
            ..good.clone()
        },
        KvLayoutParts {
            layers: vec![layer(8, [1 << 62, 8, 4])],
            ..good.clone()
        },
        KvLayoutParts {
            num_blocks: u32::MAX,
            ..good.clone()
        },
    ] {
        let error = KvLayout::from_parts(bad).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Layout, "{error}");
    }
}

#[test]
fn counts_of_hostile_parts_are_refused() {
    let good = parts(vec![layer(0, [16, 8, 4])], [2, 2, 2], 4, 32);
    let mut split = good.layers[0].clone();
    split.planes.clear();
    for bad in [
        KvLayoutParts {
            num_blocks: 0,
            ..good.clone()
        },
        KvLayoutParts {
            num_heads: 0,
            ..good.clone()
        },
        KvLayoutParts {
            block_tokens: 0,
            token_rows: 0,
            ..good.clone()
        },
        KvLayoutParts {
            token_rows: 0,
            ..good.clone()
        },
        KvLayoutParts {
            content_bytes: 0,
            ..good.clone()
        },
        KvLayoutParts {
            dtype: DType::F64,
            ..good.clone()
        },
        KvLayoutParts {
            layers: vec![],
            layer_names: vec![],
            ..good.clone()
        },
        KvLayoutParts {
            layer_names: vec![],
            ..good.clone()
        },
        KvLayoutParts {
            layers: vec![split],
            ..good.clone()
        },
        KvLayoutParts {
            content_bytes: u64::MAX,
            ..good.clone()
        },
        KvLayoutParts {
            num_heads: u32::MAX,
            token_rows: u32::MAX,
            block_tokens: u32::MAX,
            content_bytes: 1 << 20,
            ..good.clone()
        },
    ] {
        let error = KvLayout::from_parts(bad).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Layout, "{error}");
    }
}
