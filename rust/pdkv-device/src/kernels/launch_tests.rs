//! What is launched, for jobs and devices of all sizes.

use super::super::job::{Axis, Side};
use super::super::view::Lane;
use super::*;

const H200: DeviceFacts = DeviceFacts {
    capability: (9, 0),
    multiprocessors: 132,
    threads_per_multiprocessor: 2048,
    shared_bytes: 228 << 10,
    block_shared_bytes: 227 << 10,
};

const ONE: Axis = Axis {
    count: 1,
    src_stride: 0,
    dst_stride: 0,
    logical_stride: 0,
};

fn job(chunk_bytes: u64, pages: u32, lanes: u64) -> Job {
    let side = Side {
        page_stride: chunk_bytes,
        parts: 1,
        part_stride: 0,
    };
    Job {
        shape: Shape {
            chunk_bytes,
            src: side,
            dst: side,
            axes: [ONE; 2],
        },
        lanes: (0..lanes)
            .map(|lane| Lane {
                src: lane << 40,
                dst: lane << 40 | 1 << 32,
                logical: lane * chunk_bytes,
                bytes: chunk_bytes,
            })
            .collect(),
        num_pages: pages,
    }
}

fn only(job: &Job, device: &DeviceFacts, wishes: Wishes) -> Launch {
    let launches = launches(job, device, wishes).unwrap();
    assert_eq!(launches.len(), 1);
    launches[0]
}

#[test]
fn the_grid_is_full_and_no_fuller() {
    let large = only(&job(16 << 10, 4096, 80), &H200, Wishes::default());
    assert_eq!(large.entry, Entry::Tiles { unroll: 8, sums: false });
    assert_eq!((large.grid, large.block, large.shared_bytes), (132 * 3, 256, 0));
    assert_eq!(large.view.num_items, 4 * 4096 * 80);
    let small = only(&job(16 << 10, 3, 2), &H200, Wishes::default());
    assert_eq!(small.grid, 3);
    let few = DeviceFacts {
        threads_per_multiprocessor: 512,
        ..H200
    };
    assert_eq!(only(&job(16 << 10, 4096, 80), &few, Wishes::default()).grid, 132 * 2);
}

#[test]
fn a_slow_link_gets_no_more_blocks_than_it_needs() {
    let few = Wishes {
        most_blocks: Some(16),
        ..Wishes::default()
    };
    assert_eq!(only(&job(16 << 10, 4096, 80), &H200, few).grid, 16);
    assert_eq!(only(&job(16 << 10, 3, 2), &H200, few).grid, 3);
    let none = Wishes {
        most_blocks: Some(0),
        ..few
    };
    assert_eq!(only(&job(16 << 10, 3, 2), &H200, none).grid, 1);
}

#[test]
fn posting_does_not_depend_on_the_number_of_lanes() {
    let one = only(&job(16 << 10, 4096, 1), &H200, Wishes::default());
    let many = only(&job(16 << 10, 4096, 160), &H200, Wishes::default());
    assert_eq!((one.entry, one.grid, one.block), (many.entry, many.grid, many.block));
}

#[test]
fn alignment_decides_the_width() {
    let sums = Wishes {
        bulk: Some(0),
        sums: true,
        most_blocks: None,
    };
    for (shift, width) in [(0, 1), (1, 2), (2, 4), (3, 8)] {
        let mut job = job(16 << 10, 4, 2);
        job.lanes[1].dst += 1 << shift;
        let launch = only(&job, &H200, sums);
        assert_eq!(launch.entry, Entry::Vectors { width, sums: true });
        assert_eq!(launch.view.tile_bytes, width);
    }
    // Logical offsets count for checksums only, strides that are never taken do not at all.
    let mut odd = job(16 << 10, 4, 2);
    odd.lanes[0].logical = 3;
    assert_eq!(only(&odd, &H200, sums).entry, Entry::Vectors { width: 1, sums: true });
    assert!(matches!(
        only(&odd, &H200, Wishes::default()).entry,
        Entry::Tiles { .. }
    ));
    let mut job = job(16 << 10, 4, 2);
    job.shape.axes[0].src_stride = 3;
    job.shape.src.part_stride = 5;
    assert!(matches!(
        only(&job, &H200, Wishes::default()).entry,
        Entry::Tiles { .. }
    ));
}

#[test]
fn where_shared_memory_is_short_the_bulk_engine_has_smaller_tiles() {
    // As of GPUs of compute capability 12.0.
    let small = DeviceFacts {
        capability: (12, 0),
        multiprocessors: 170,
        threads_per_multiprocessor: 1536,
        shared_bytes: 100 << 10,
        block_shared_bytes: 99 << 10,
    };
    for sums in [false, true] {
        let wishes = Wishes {
            bulk: Some(0),
            sums,
            most_blocks: None,
        };
        for chunk in (2 << 10..40 << 10).step_by(16) {
            let launch = only(&job(chunk, 8, 2), &small, wishes);
            assert_eq!(launch.entry, Entry::Bulk { sums }, "{chunk}");
            assert!(launch.view.stages >= 2, "{chunk}");
            assert!(launch.shared_bytes * 4 + 4 * 2048 <= small.shared_bytes, "{chunk}");
        }
    }
}

#[test]
fn the_bulk_engine_is_asked_for_and_there() {
    let wishes = Wishes {
        bulk: Some(0),
        ..Wishes::default()
    };
    let bulk = only(&job(40 << 10, 64, 8), &H200, wishes);
    assert_eq!(bulk.entry, Entry::Bulk { sums: false });
    // Three tiles of 13,664 bytes, the last one short; as many of them as fit four times into a multiprocessor.
    assert_eq!(
        (bulk.view.tile_bytes, bulk.view.tiles.divisor, bulk.view.stages),
        (13_664, 3, 4)
    );
    assert_eq!(bulk.shared_bytes, 4 * 13_664);
    assert_eq!((bulk.block, bulk.grid), (32, 132 * 4));
    let older = DeviceFacts {
        capability: (8, 0),
        ..H200
    };
    assert!(matches!(
        only(&job(40 << 10, 64, 8), &older, wishes).entry,
        Entry::Tiles { .. }
    ));
    let narrow = DeviceFacts {
        block_shared_bytes: 5 << 10,
        ..H200
    };
    assert!(matches!(
        only(&job(40 << 10, 64, 8), &narrow, wishes).entry,
        Entry::Tiles { .. }
    ));
    assert!(matches!(
        only(&job(1 << 10, 64, 8), &H200, wishes).entry,
        Entry::Tiles { .. }
    ));
    // Only pieces from the size on that the wish names.
    let long = Wishes {
        bulk: Some(40 << 10),
        ..wishes
    };
    assert_eq!(
        only(&job(40 << 10, 64, 8), &H200, long).entry,
        Entry::Bulk { sums: false }
    );
    assert!(matches!(
        only(&job((40 << 10) - 16, 64, 8), &H200, long).entry,
        Entry::Tiles { .. }
    ));
}

#[test]
fn work_past_32_bits_is_cut_and_covered_once() {
    // 2^20 pages of 2^10 single bytes in 7 lanes: 2^30 items a lane, three lanes a launch.
    let mut bytes = job(1 << 10, 1 << 20, 7);
    bytes.lanes[0].src += 1;
    // 2^32 + 2^13 pages would be too many, so large pages: 2^22 bytes in 2^13 pages of 2 lanes.
    let mut pages = job(1 << 22, 1 << 13, 2);
    pages.lanes[0].src += 1;
    for (job, count) in [(bytes, 3), (pages, 18)] {
        let found = launches(&job, &H200, Wishes::default()).unwrap();
        let mut covered = 0;
        for launch in &found {
            let view = launch.view;
            let items = u64::from(view.num_lanes) * u64::from(view.pages.divisor) * job.shape.chunk_bytes;
            assert_eq!(items, u64::from(view.num_items));
            assert!(launch.first_lane + view.num_lanes <= job.lanes.len() as u32);
            assert!(view.first_page + view.pages.divisor <= job.num_pages);
            covered += items;
        }
        assert_eq!(covered, job.total_bytes());
        let mut starts: Vec<_> = found.iter().map(|it| (it.first_lane, it.view.first_page)).collect();
        starts.dedup();
        assert_eq!((starts.len(), found.len()), (count, count), "{starts:?}");
    }
}

#[test]
fn nothing_is_no_launch_and_nonsense_is_refused() {
    assert!(launches(&job(64, 0, 4), &H200, Wishes::default()).unwrap().is_empty());
    assert!(launches(&job(64, 4, 0), &H200, Wishes::default()).unwrap().is_empty());
    let mut hollow = job(64, 4, 1);
    hollow.shape.axes[1].count = 0;
    let mut huge = job(1 << 33, 4, 1);
    huge.lanes[0].src += 1;
    let mut longer = job(64, 4, 1);
    longer.lanes[0].bytes = 65;
    for job in [job(0, 4, 1), hollow, huge, longer] {
        let error = launches(&job, &H200, Wishes::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Layout);
    }
}
