//! The size of plans for real caches: O(blocks) + O(layers), never their product.

use pdkv_core::block_table::BlockTable;
use pdkv_core::dtype::DType;
use pdkv_core::layout::{KvLayout, KvLayoutParts, LayerLayout, LayerTensors, LayoutRequest, Plane, TensorFacts};
use pdkv_core::plan::{PageWalk, Plan, Selection, WireOrder};

/// 80 layers of 200,000 blocks with 8 heads of 128 + 128 values, each layer an allocation.
fn large() -> KvLayout {
    let tensors: Vec<_> = (0..80)
        .map(|layer| {
            LayerTensors::Joined(TensorFacts {
                name: format!("layers.{layer}"),
                address: (layer + 1) << 40,
                shape: vec![200_000, 8, 16, 256],
                strides_bytes: vec![65536, 8192, 512, 2],
                item_bytes: 2,
                dtype: DType::BF16,
            })
        })
        .collect();
    LayoutRequest::parse("BHNC", 16)
        .unwrap()
        .resolve(&tensors)
        .unwrap()
        .layout
}

/// 100,000 of 200,000 ids, no two neighbours consecutive: 77,773 is coprime to 200,000.
fn scattered(first: u64) -> BlockTable {
    let ids: Vec<u32> = (0..100_000)
        .map(|index| ((first + index * 77_773) % 200_000) as u32)
        .collect();
    let table = BlockTable::from_ids(&ids);
    assert_eq!(table.runs().len(), 100_000);
    table
}

#[test]
fn a_random_plan_stays_below_8_mb() {
    let layout = large();
    let (src, dst) = (scattered(3), scattered(100));
    let plan = Plan::pages(&layout, &src, &layout, &dst, &Selection::all(&layout)).unwrap();
    assert_eq!((plan.unit_count(), plan.run_count()), (8_000_000, 8_000_000));
    assert_eq!(plan.total_bytes(), 8_000_000 * 65536);
    assert!(plan.memory_bytes() < 8_000_000, "{}", plan.memory_bytes());
    let one = Plan::pages(&layout, &src, &layout, &dst, &Selection::layers(0, 1)).unwrap();
    assert!(plan.memory_bytes() - one.memory_bytes() < 80 * 64);
    let walk = PageWalk::scatter(&layout, &dst, &Selection::all(&layout), WireOrder::natural(&layout)).unwrap();
    assert!(walk.memory_bytes() < 2_000_000, "{}", walk.memory_bytes());
    assert_eq!(walk.total_bytes(), plan.total_bytes());
}

/// As a peer might state it: valid in itself, and with a table that reads blocks again and again.
#[test]
fn a_walk_beyond_64_bits_is_refused() {
    let plane = Plane { region: 0, offset: 0 };
    let layout = KvLayout::from_parts(KvLayoutParts {
        dtype: DType::Raw,
        num_blocks: 2,
        num_heads: 1 << 20,
        block_tokens: 1 << 20,
        token_rows: 1 << 20,
        content_bytes: 1 << 20,
        layers: vec![LayerLayout {
            planes: vec![plane],
            block_stride: 1 << 60,
            head_stride: 1 << 40,
            token_stride: 1 << 20,
        }],
        layer_names: vec![String::new()],
        region_bytes: vec![1 << 61],
    })
    .unwrap();
    let all = Selection::all(&layout);
    let table = BlockTable::from_ids(&[0; 16]);
    for order in [WireOrder::natural(&layout), WireOrder::LAYER_MAJOR] {
        assert!(
            PageWalk::new(&layout, &table, &all, order)
                .unwrap_err()
                .message()
                .contains("64 bits")
        );
        let walk = PageWalk::new(&layout, &table.slice(0, 15).unwrap(), &all, order).unwrap();
        assert_eq!(walk.total_bytes(), 15 << 60);
    }
    assert!(Plan::pages(&layout, &table, &layout, &table, &all).is_err());
}

#[test]
fn one_run_is_one_segment() {
    let layout = large();
    let table = BlockTable::from_ids(&(0..100_000).collect::<Vec<_>>());
    let plan = Plan::pages(&layout, &table, &layout, &table, &Selection::all(&layout)).unwrap();
    assert_eq!((plan.run_count(), plan.unit_count()), (80, 8_000_000));
    assert!(plan.memory_bytes() < 16_384, "{}", plan.memory_bytes());
    assert!(plan.explain().to_string().contains("1 segments x 80 lanes"));
}
