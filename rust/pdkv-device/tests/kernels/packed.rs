//! Packing is a plan onto the layout of a stream, unpacking one from it; both ends sum alike, whatever their own layouts.

use pdkv_core::plan::{Plan, Selection, WireAxis, WireOrder};
use pdkv_device::kernels::{DeviceFacts, Logical, Wishes};

use crate::caches::{Cache, Counts, Placement, table};
use crate::plans::check;
use crate::twin::{Build, Twin, compile};

#[test]
fn who_packs_and_who_unpacks_agree() {
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
        let (_, packed) = check(
            &mut twin,
            &pack,
            [from, &stream].map(KvLayout::region_bytes),
            Logical::Destination,
            &device,
            wishes,
            1,
        );
        let (_, unpacked) = check(
            &mut twin,
            &unpack,
            [&stream, to].map(KvLayout::region_bytes),
            Logical::Source,
            &device,
            wishes,
            2,
        );
        // The two cases hold different bytes, so equal sums must come from equal weights: take what was packed.
        assert_ne!(packed, unpacked);
        assert_eq!(
            sums_of_packed(&pack, [from, &stream]),
            sums_of_unpacked(&pack, &unpack, [from, &stream, to])
        );
    }
}

use pdkv_core::layout::KvLayout;
use pdkv_device::kernels::{Checksum, Jobs, reference};

use crate::memory::Memory;

/// Packs by the Rust twin: the sums, and the memory after it.
fn packed(plan: &Plan, [from, stream]: [&KvLayout; 2]) -> (Vec<Checksum>, Memory) {
    let mut memory = Memory::new(from.region_bytes(), stream.region_bytes());
    let sums = run(plan, &mut memory, from.region_bytes().len(), Logical::Destination);
    (sums, memory)
}

fn sums_of_packed(plan: &Plan, layouts: [&KvLayout; 2]) -> Vec<Checksum> {
    packed(plan, layouts).0
}

fn sums_of_unpacked(pack: &Plan, unpack: &Plan, [from, stream, to]: [&KvLayout; 3]) -> Vec<Checksum> {
    let (_, sent) = packed(pack, [from, stream]);
    let mut memory = Memory::new(stream.region_bytes(), to.region_bytes());
    memory.regions[0].1.clone_from(&sent.regions.last().unwrap().1);
    run(unpack, &mut memory, 1, Logical::Source)
}

fn run(plan: &Plan, memory: &mut Memory, sources: usize, logical: Logical) -> Vec<Checksum> {
    let geometry = plan.geometry().unwrap();
    let (src, dst) = memory.bases(sources);
    let mut sums = vec![Checksum::default(); geometry.positions() as usize];
    let jobs = Jobs::of(plan, &src, &dst, logical).unwrap();
    for job in &jobs.list {
        reference::run(job, &jobs.tables, memory, &mut sums);
    }
    sums
}
