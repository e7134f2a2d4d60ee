//! Two caches on a device and a plan between them, with what the planner's own walk makes of the bytes.

use std::ops::ControlFlow;

use pdkv_core::block_table::BlockTable;
use pdkv_core::dtype::DType;
use pdkv_core::layout::{KvLayout, KvLayoutParts, LayerLayout, Plane};
use pdkv_core::plan::{Plan, Selection};
use pdkv_device::cuda::{Context, DeviceBuffer, Stream};
use pdkv_device::kernels::{Checksum, Jobs, reference};

/// What a test wants of its caches.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    /// Layers, each in a region of its own if they are few.
    pub(crate) layers: u32,
    /// Whether heads come before tokens on both sides, or at the destination only.
    pub(crate) same: bool,
    /// Bytes of a head and token.
    pub(crate) content: u64,
    /// Blocks that are read, and blocks that they fill.
    pub(crate) blocks: (Vec<u32>, Vec<u32>),
}

impl Wish {
    pub(crate) fn new(layers: u32, content: u64) -> Self {
        Self {
            layers,
            same: true,
            content,
            blocks: (vec![4, 0, 1], vec![1, 3, 2]),
        }
    }
}

/// Two caches, filled, and what is to happen.
pub(crate) struct Pair {
    pub(crate) jobs: Jobs,
    /// What the sums of the pages will be.
    pub(crate) sums: Vec<u64>,
    buffers: Vec<DeviceBuffer>,
    /// How many of the buffers are the source's.
    sources: usize,
    before: Vec<Vec<u8>>,
    expected: Vec<Vec<u8>>,
}

impl Pair {
    pub(crate) fn new(context: &Context, stream: &Stream, wish: &Wish) -> Self {
        let count = |ids: &[u32]| ids.iter().max().map_or(1, |most| most + 1);
        let (from, to) = (
            layout(wish.layers, count(&wish.blocks.0), true, wish.content),
            layout(wish.layers, count(&wish.blocks.1), wish.same, wish.content),
        );
        let plan = Plan::pages(
            &from,
            &BlockTable::from_ids(&wish.blocks.0),
            &to,
            &BlockTable::from_ids(&wish.blocks.1),
            &Selection::all(&from),
        )
        .unwrap();
        let sizes = from.region_bytes().iter().chain(to.region_bytes());
        let buffers: Vec<_> = sizes
            .map(|&bytes| DeviceBuffer::new(context, bytes as usize).unwrap())
            .collect();
        let mut flat = Flat { regions: Vec::new() };
        for (number, buffer) in buffers.iter().enumerate() {
            let bytes: Vec<u8> = (0..buffer.len())
                .map(|at| (at * 31 + number * 7 + at / 251) as u8)
                .collect();
            buffer.write(stream, 0, &bytes).unwrap();
            flat.regions.push((buffer.address(), bytes));
        }
        let addresses: Vec<_> = buffers.iter().map(DeviceBuffer::address).collect();
        let (src, dst) = addresses.split_at(from.region_bytes().len());
        let jobs = Jobs::of(&plan, src, dst).unwrap();
        let sources = src.len();
        let before: Vec<_> = flat.regions.iter().map(|(_, bytes)| bytes.clone()).collect();
        let mut expected = before.clone();
        let _ = plan.walk(0..plan.unit_count(), |run| {
            let bytes = &flat.regions[run.src.region as usize].1[run.src.offset as usize..][..run.len as usize];
            expected[sources + run.dst.region as usize][run.dst.offset as usize..][..run.len as usize]
                .copy_from_slice(bytes);
            ControlFlow::Continue(())
        });
        let mut sums = vec![Checksum::default(); wish.blocks.0.len()];
        for job in &jobs.list {
            reference::run(job, &jobs.tables, &mut flat, &mut sums);
        }
        Self {
            jobs,
            sums: sums.into_iter().map(Checksum::value).collect(),
            buffers,
            sources,
            before,
            expected,
        }
    }

    /// Fails unless every byte is as the walk left it.
    pub(crate) fn check(&self, stream: &Stream) {
        for (number, (buffer, bytes)) in self.buffers.iter().zip(&self.expected).enumerate() {
            let mut found = vec![0; buffer.len()];
            buffer.read(stream, 0, &mut found).unwrap();
            assert!(found == *bytes, "wrong bytes in buffer {number}");
        }
    }

    /// Makes the destination what it was before.
    pub(crate) fn reset(&self, stream: &Stream) {
        for (buffer, bytes) in self.buffers.iter().zip(&self.before).skip(self.sources) {
            buffer.write(stream, 0, bytes).unwrap();
        }
    }
}

/// Layers in regions of their own, or many of them in one; heads before tokens or after them.
pub(crate) fn layout(layers: u32, blocks: u32, heads_first: bool, content_bytes: u64) -> KvLayout {
    let (heads, tokens) = (2, 4);
    let block = content_bytes * 8;
    let (head_stride, token_stride) = if heads_first {
        (content_bytes * 4, content_bytes)
    } else {
        (content_bytes, content_bytes * 2)
    };
    let apart = layers <= 4;
    let bytes = u64::from(blocks) * block * 2;
    let layer = |number: u32| LayerLayout {
        planes: [0, bytes / 2]
            .map(|plane| Plane {
                region: if apart { number } else { 0 },
                offset: plane + if apart { 0 } else { u64::from(number) * bytes },
            })
            .to_vec(),
        block_stride: block,
        head_stride,
        token_stride,
    };
    KvLayout::from_parts(KvLayoutParts {
        dtype: DType::U8,
        num_blocks: blocks,
        num_heads: heads,
        block_tokens: tokens,
        token_rows: tokens,
        content_bytes,
        layers: (0..layers).map(layer).collect(),
        layer_names: (0..layers).map(|number| format!("layers.{number}")).collect(),
        region_bytes: if apart {
            vec![bytes; layers as usize]
        } else {
            vec![bytes * u64::from(layers)]
        },
    })
    .unwrap()
}

struct Flat {
    regions: Vec<(u64, Vec<u8>)>,
}

impl Flat {
    fn find(&self, address: u64) -> (usize, usize) {
        let holds = |(base, bytes): &(u64, Vec<u8>)| address >= *base && address - base < bytes.len() as u64;
        let region = self.regions.iter().position(holds).unwrap();
        (region, (address - self.regions[region].0) as usize)
    }
}

impl reference::Memory for Flat {
    fn read(&self, address: u64, bytes: &mut [u8]) {
        let (region, at) = self.find(address);
        bytes.copy_from_slice(&self.regions[region].1[at..at + bytes.len()]);
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        let (region, at) = self.find(address);
        self.regions[region].1[at..at + bytes.len()].copy_from_slice(bytes);
    }
}
