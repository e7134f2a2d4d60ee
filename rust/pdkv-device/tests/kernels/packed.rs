//! Packing is a plan onto the layout of a stream, unpacking one from it.

use pdkv_core::layout::KvLayout;
use pdkv_core::plan::{Plan, Selection, WireAxis, WireOrder};
use pdkv_device::kernels::{DeviceFacts, Wishes};

use crate::caches::{Cache, Counts, Placement, table};
use crate::plans::check;
use crate::twin::{Build, Twin, compile};

#[test]
fn what_is_packed_is_a_cache_like_any_other() {
    let Some(program) = compile(Build::Sanitized) else {
        return;
    };
    let mut twin = Twin::start(program);
    let counts = Counts {
        layers: 3,
        planes: 2,
        heads: 2,
        tokens: 4,
        content: 24,
    };
    let device = DeviceFacts {
        capability: (9, 0),
        multiprocessors: 2,
        threads_per_multiprocessor: 2048,
        shared_bytes: 128 << 10,
        block_shared_bytes: 127 << 10,
    };
    let wishes = Wishes {
        sums: true,
        bulk: Some(0),
        most_blocks: None,
    };
    let odd = WireOrder::new([
        WireAxis::Head,
        WireAxis::Block,
        WireAxis::Token,
        WireAxis::Plane,
        WireAxis::Layer,
    ])
    .unwrap();
    for order in [WireOrder::LAYER_MAJOR, WireOrder::BLOCK_MAJOR, odd] {
        let (from, to) = (
            Cache::new(&counts, &Placement::dense(6, [0, 1, 2, 4, 3])),
            Cache::new(&counts, &Placement::dense(9, [2, 0, 1, 3, 4])),
        );
        let (from, to) = (&from.resolved.layout, &to.resolved.layout);
        let stream = from.packed(4, order).unwrap();
        assert_eq!(stream.region_bytes(), [4 * from.block_bytes()]);
        let all = Selection::all(from);
        let identity = table(&[0, 1, 2, 3]);
        let pack = Plan::pages(from, &table(&[5, 0, 1, 3]), &stream, &identity, &all).unwrap();
        let unpack = Plan::pages(&stream, &identity, to, &table(&[8, 2, 3, 0]), &all).unwrap();
        for (plan, sides) in [(&pack, [from, &stream]), (&unpack, [&stream, to])] {
            check(&mut twin, plan, sides.map(KvLayout::region_bytes), &device, wishes, 1);
        }
    }
}
