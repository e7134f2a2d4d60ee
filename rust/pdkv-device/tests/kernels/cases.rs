//! Small caches of any placement, with sizes at which every kernel is chosen, and devices of any size.

use pdkv_device::kernels::{DeviceFacts, Wishes};
use proptest::prelude::*;

use crate::caches::{Counts, Placement};

pub(crate) fn counts() -> impl Strategy<Value = Counts> {
    // Elements of two bytes: from 2 bytes to more than a tile of the bulk kernel.
    let content = prop_oneof![
        1_u64..9,
        Just(8),
        Just(64),
        Just(128),
        Just(576),
        Just(1024),
        200_u64..1500
    ];
    (1_u64..4, 1_u64..3, 1_u64..4, 1_u64..5, content).prop_map(|(layers, planes, heads, tokens, content)| Counts {
        layers,
        planes,
        heads,
        tokens,
        content,
    })
}

pub(crate) fn placement() -> impl Strategy<Value = Placement> {
    let pad = || prop_oneof![8 => Just(0_u64), 1 => 1_u64..20, 2 => (1_u64..4).prop_map(|pad| pad * 16)];
    // Memory in the model's order is the common case, in which pieces are long.
    let memory = prop_oneof![
        Just([0_usize, 1, 2, 3, 4]),
        Just([0, 1, 2, 4, 3]),
        Just([2, 0, 1, 3, 4]),
        Just([0_usize, 1, 2, 3, 4]).prop_shuffle()
    ];
    (1_u64..7, memory, [pad(), pad(), pad(), pad(), pad()], any::<bool>()).prop_map(
        |(blocks, memory, pads, layers_apart)| Placement {
            blocks,
            memory,
            pads,
            layers_apart,
            split: false,
            shape: [0, 1, 2, 3, 4],
        },
    )
}

pub(crate) fn device() -> impl Strategy<Value = DeviceFacts> {
    (
        8_u32..11,
        1_u32..5,
        prop_oneof![Just(1024_u32), Just(2048)],
        16_u32..228,
    )
        .prop_map(|(major, multiprocessors, threads, shared)| DeviceFacts {
            capability: (major, 0),
            multiprocessors,
            threads_per_multiprocessor: threads,
            shared_bytes: shared << 10,
            block_shared_bytes: (shared << 10).saturating_sub(1024),
        })
}

pub(crate) fn wishes() -> impl Strategy<Value = Wishes> {
    let most_blocks = prop_oneof![2 => Just(None), 1 => (1_u32..3).prop_map(Some)];
    // Where it can, or for the longer pieces of a plan only.
    let bulk = prop_oneof![2 => Just(None), 1 => Just(Some(0)), 1 => (1_u64..40_000).prop_map(Some)];
    (any::<bool>(), bulk, most_blocks).prop_map(|(sums, bulk, most_blocks)| Wishes {
        sums,
        bulk,
        most_blocks,
    })
}
