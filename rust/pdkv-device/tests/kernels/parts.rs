//! What no plan of today makes: pages of different sizes on the two sides, and ranks that hold a part of the heads.

use pdkv_device::kernels::{
    Axis, Checksum, DeviceFacts, Job, Lane, PageTables, Shape, Side, Wishes, launches, read_backs, reference,
};

use crate::memory::Memory;
use crate::twin::{Build, Twin, compile};

const DEVICE: DeviceFacts = DeviceFacts {
    capability: (9, 0),
    multiprocessors: 1,
    threads_per_multiprocessor: 2048,
    shared_bytes: 64 << 10,
    block_shared_bytes: 63 << 10,
};

#[test]
fn four_small_pages_fill_a_large_one_and_come_back() {
    let Some(program) = compile(Build::Sanitized) else {
        return;
    };
    let mut twin = Twin::start(program);
    // 16 tokens to a small page, 64 to a large one, two heads; heads before tokens at one side, after them at the other.
    let (content, heads, tokens) = (96, 2_u64, 16_u64);
    let small = Side {
        page_stride: content * heads * tokens,
        parts: 1,
        part_stride: 0,
    };
    let large = Side {
        page_stride: small.page_stride * 4,
        parts: 4,
        part_stride: content * tokens,
    };
    let axis = |count: u64, small: u64, large: u64, logical_stride: u64| (count as u32, small, large, logical_stride);
    let axes = [
        axis(tokens, content * heads, content, content),
        axis(heads, content, content * tokens * 4, content * tokens),
    ];
    let forward = axes.map(|(count, src_stride, dst_stride, logical_stride)| Axis {
        count,
        src_stride,
        dst_stride,
        logical_stride,
    });
    let back = axes.map(|(count, dst_stride, src_stride, logical_stride)| Axis {
        count,
        src_stride,
        dst_stride,
        logical_stride,
    });
    let (few, many) = (vec![2, 0], vec![7, 1, 3, 4, 9, 0, 2]);
    // The last large page is filled by three quarters.
    let num_pages = many.len() as u32;
    for (src, dst, axes, tables, sizes) in [
        (
            small,
            large,
            forward,
            (many.clone(), few.clone()),
            [10 * small.page_stride, 3 * large.page_stride],
        ),
        (
            large,
            small,
            back,
            (few, many),
            [3 * large.page_stride, 10 * small.page_stride],
        ),
    ] {
        let memory = Memory::new(&sizes[..1], &sizes[1..]);
        let job = Job {
            shape: Shape {
                chunk_bytes: content,
                src,
                dst,
                axes,
            },
            lanes: vec![Lane {
                src: memory.regions[0].0,
                dst: memory.regions[1].0,
                logical: 0,
                bytes: content,
            }],
            num_pages,
        };
        let tables = PageTables {
            src: Some(tables.0),
            dst: Some(tables.1),
        };
        check(&mut twin, &memory, &job, &tables);
    }
}

/// Half of the heads, as ranks of another number have them: tokens before heads, and heads before tokens.
#[test]
fn a_rank_takes_its_heads_out_of_all() {
    let Some(program) = compile(Build::Sanitized) else {
        return;
    };
    let mut twin = Twin::start(program);
    let (content, tokens, heads) = (256_u64, 16_u64, 4_u64);
    let one = Axis {
        count: 1,
        src_stride: 0,
        dst_stride: 0,
        logical_stride: 0,
    };
    let by_token = Axis {
        count: tokens as u32,
        src_stride: heads * content,
        dst_stride: heads / 2 * content,
        logical_stride: heads / 2 * content,
    };
    for rank in [0, 1] {
        for (inner, chunk_bytes) in [(by_token, heads / 2 * content), (one, heads / 2 * tokens * content)] {
            let side = |heads: u64| Side {
                page_stride: heads * tokens * content,
                parts: 1,
                part_stride: 0,
            };
            let (src, dst) = (side(heads), side(heads / 2));
            let memory = Memory::new(&[5 * src.page_stride], &[4 * dst.page_stride]);
            let first = if inner.count == 1 { tokens * content } else { content };
            let job = Job {
                shape: Shape {
                    chunk_bytes,
                    src,
                    dst,
                    axes: [one, inner],
                },
                lanes: vec![Lane {
                    src: memory.regions[0].0 + rank * heads / 2 * first,
                    dst: memory.regions[1].0,
                    logical: 0,
                    bytes: chunk_bytes,
                }],
                num_pages: 3,
            };
            let tables = PageTables {
                src: Some(vec![4, 0, 2]),
                dst: Some(vec![1, 3, 0]),
            };
            let after = check(&mut twin, &memory, &job, &tables);
            let at = |page: u64, heads: u64, head: u64, token: u64| {
                let within = if inner.count == 1 {
                    head * tokens + token
                } else {
                    token * heads + head
                };
                ((page * heads * tokens + within) * content) as usize
            };
            for (from, to) in [(4, 1), (0, 3), (2, 0)] {
                for (token, head) in (0..tokens).flat_map(|token| [(token, 0), (token, 1)]) {
                    let from = at(from, heads, rank * heads / 2 + head, token);
                    let to = at(to, heads / 2, head, token);
                    let bytes = content as usize;
                    assert_eq!(
                        after.regions[1].1[to..to + bytes],
                        memory.regions[0].1[from..from + bytes]
                    );
                }
            }
        }
    }
}

/// What was placed has the same sums, and not where a byte of it is another.
fn check_read_back(twin: &mut Twin, placed: &Memory, job: &Job, tables: &PageTables, sums: &[Checksum]) {
    let work = [(job, read_backs(job, &DEVICE, Wishes::default()).unwrap())];
    let mut found = |memory: &Memory| {
        let outcome = twin.run(memory, tables, &work, 5, 0).expect("the twin lives");
        assert!(outcome.memory == *memory, "reading has written");
        outcome.sums
    };
    let sums: Vec<_> = sums.iter().map(|sum| sum.value()).collect();
    assert_eq!(found(placed), sums);
    let Shape { dst, axes, .. } = &job.shape;
    let last = axes.map(|axis| u64::from(axis.count - 1) * axis.dst_stride);
    for page in 0..job.num_pages {
        let mut wrong = placed.clone();
        let entry = tables.dst.as_ref().unwrap()[(page / dst.parts) as usize];
        let start = u64::from(entry) * dst.page_stride + u64::from(page % dst.parts) * dst.part_stride;
        wrong.regions[1].1[(start + last[0] + last[1] + job.shape.chunk_bytes - 1) as usize] ^= 0x40;
        let found = found(&wrong);
        let differing: Vec<u32> = (0..job.num_pages)
            .filter(|&page| found[page as usize] != sums[page as usize])
            .collect();
        assert_eq!(differing, [page]);
    }
}

/// Runs a job by both twins, compares, and gives what is there after it.
fn check(twin: &mut Twin, memory: &Memory, job: &Job, tables: &PageTables) -> Memory {
    let mut sums = vec![Checksum::default(); job.num_pages as usize];
    let mut expected = memory.clone();
    reference::run(job, tables, &mut expected, &mut sums);
    let (before, after) = (&memory.regions[1].1, &expected.regions[1].1);
    let touched = after.iter().zip(before).filter(|(a, b)| a != b).count();
    assert!(
        touched as u64 > job.total_bytes() * 9 / 10,
        "the Rust twin moved {touched} bytes"
    );
    for bulk in [None, Some(0)] {
        let wishes = Wishes {
            sums: true,
            bulk,
            most_blocks: None,
        };
        let work = [(job, launches(job, &DEVICE, wishes).unwrap())];
        let outcome = twin.run(memory, tables, &work, 5, 1).expect("the twin lives");
        assert!(outcome.memory == expected);
        assert_eq!(outcome.sums, sums.iter().map(|sum| sum.value()).collect::<Vec<_>>());
    }
    check_read_back(twin, &expected, job, tables, &sums);
    expected
}
