//! The ring of the bulk kernel, with many more tiles than stages, and copies that happen as early or as late as they may.

use pdkv_device::kernels::{
    Axis, Checksum, DeviceFacts, Entry, Job, Lane, PageTables, Shape, Side, Wishes, launches, reference,
};

use crate::memory::Memory;
use crate::twin::{Build, Twin, compile};

const ONE: Axis = Axis {
    count: 1,
    src_stride: 0,
    dst_stride: 0,
    logical_stride: 0,
};

#[test]
fn no_tile_is_overwritten_before_it_has_left() {
    let Some(program) = compile(Build::Sanitized) else {
        return;
    };
    let mut twin = Twin::start(program);
    let (chunk, pages, lanes) = (5008_u64, 60_u64, 2_u64);
    let side = Side {
        page_stride: chunk + 48,
        parts: 1,
        part_stride: 0,
    };
    let bytes = pages * side.page_stride;
    let memory = Memory::new(&[bytes; 2], &[bytes; 2]);
    let job = Job {
        shape: Shape {
            chunk_bytes: chunk,
            src: side,
            dst: side,
            axes: [ONE; 2],
        },
        lanes: (0..lanes as usize)
            .map(|lane| Lane {
                src: memory.regions[lane].0,
                dst: memory.regions[2 + lane].0 + 16,
                logical: lane as u64 * chunk,
                bytes: chunk,
            })
            .collect(),
        num_pages: pages as u32,
    };
    let tables = PageTables {
        src: Some((0..pages as u32).rev().collect()),
        dst: None,
    };
    let mut expected = memory.clone();
    let mut sums = vec![Checksum::default(); pages as usize];
    reference::run(&job, &tables, &mut expected, &mut sums);
    let sums: Vec<u64> = sums.into_iter().map(Checksum::value).collect();
    // From two stages to all eight.
    for shared_bytes in [50 << 10, 75 << 10, 228 << 10] {
        let device = DeviceFacts {
            capability: (9, 0),
            multiprocessors: 1,
            threads_per_multiprocessor: 2048,
            shared_bytes,
            block_shared_bytes: shared_bytes - 1024,
        };
        let wishes = Wishes {
            sums: true,
            bulk: Some(0),
            most_blocks: None,
        };
        let list = launches(&job, &device, wishes).unwrap();
        assert_eq!((list.len(), list[0].entry), (1, Entry::Bulk { sums: true }));
        assert!(list[0].view.num_items > 3 * list[0].grid * list[0].view.stages);
        // Two bits of the seed: loads early or late, stores early or late.
        for seed in 0..4 {
            let work = [(&job, list.clone())];
            let outcome = twin.run(&memory, &tables, &work, seed, 9).expect("the twin lives");
            assert!(
                outcome.memory == expected,
                "wrong bytes with {} stages, seed {seed}",
                list[0].view.stages
            );
            assert_eq!(outcome.sums, sums);
            assert_eq!((outcome.flag, outcome.arrived), (9, 0));
        }
    }
}
