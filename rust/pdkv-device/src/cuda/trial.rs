//! Every kernel of a GPU's image on drawn jobs, against the plain twin: for `pdkv doctor`, whose machine nobody has tested them on.

use std::collections::BTreeSet;

use pdkv_core::{Error, ErrorKind, Result};

use super::gpu::Gpu;
use super::memory::DeviceBuffer;
use super::queue::CopyQueue;
use crate::kernels::{
    Axis, Checksum, Entry, Job, Jobs, Lane, PageTables, Shape, Side, Wishes, launches, read_backs, reference,
};

const TRY: &str = "try the kernels";
/// Jobs for each kernel that copies.
const ROUNDS: u64 = 3;
/// Pages of each side; a job copies some of them.
const PAGES: u64 = 12;
const LANES: u64 = 2;

/// Runs every kernel of a GPU on jobs that are drawn from a seed, reads back what they placed, and compares all bytes and checksums with the plain
/// twin's. Returns the kernels' names. Waits for the GPU.
///
/// # Errors
/// `Integrity` naming the kernels that left a wrong byte or added up a wrong checksum; `Unsupported` without kernels, `Device` when the driver fails.
pub fn try_kernels(gpu: &Gpu, seed: u64) -> Result<BTreeSet<String>> {
    let mut queue = CopyQueue::new(gpu.kernels()?)?;
    let mut draw = Draw(seed);
    let mut ran = BTreeSet::new();
    let all = Entry::all(gpu.facts().capability.0);
    let copy = |entry: &&Entry| !matches!(entry, Entry::ReadBack { .. });
    for &entry in all.iter().filter(copy) {
        for _ in 0..ROUNDS {
            ran.extend(try_one(gpu, &mut queue, entry, &mut draw)?);
        }
    }
    match all.into_iter().map(Entry::name).find(|name| !ran.contains(name)) {
        None => Ok(ran),
        Some(name) => Err(Error::new(ErrorKind::Internal, TRY, format!("no job chose `{name}`"))),
    }
}

/// Tries a kernel, and what reads back behind it; returns their names.
fn try_one(gpu: &Gpu, queue: &mut CopyQueue, entry: Entry, draw: &mut Draw) -> Result<BTreeSet<String>> {
    let (width, chunk_bytes, sums) = match entry {
        Entry::Tiles { unroll, sums } => (16, u64::from(unroll) * 512, sums),
        // Too short for tiles.
        Entry::Vectors { width, sums } => (u64::from(width), u64::from(width) * (2 * draw.below(7) + 1), sums),
        Entry::Bulk { sums } => (16, 16 * (128 + draw.below(1000)), sums),
        Entry::ReadBack { .. } => (16, 16, true),
    };
    let shape = drawn_shape(width, chunk_bytes, draw);
    let side_bytes = [shape.src, shape.dst].map(|side| LANES * PAGES * side.page_stride);
    let device = |bytes: u64| DeviceBuffer::new(gpu.context(), bytes as usize);
    let [src, dst] = [device(side_bytes[0])?, device(side_bytes[1])?];
    let mut twin = Twin([&src, &dst].map(|buffer| {
        let bytes = (0..buffer.len()).map(|_| draw.next() as u8).collect();
        (buffer.address(), bytes)
    }));
    for (buffer, (_, bytes)) in [&src, &dst].into_iter().zip(&twin.0) {
        buffer.write(queue.stream(), 0, bytes)?;
    }
    let num_pages = 1 + draw.below(PAGES);
    let lanes = (0..LANES).map(|lane| Lane {
        src: src.address() + lane * PAGES * shape.src.page_stride,
        dst: dst.address() + lane * PAGES * shape.dst.page_stride,
        logical: lane * shape.page_bytes(),
        bytes: chunk_bytes,
    });
    let job = Job {
        shape,
        lanes: lanes.collect(),
        num_pages: num_pages as u32,
    };
    let mut table = || Some(draw.order().into_iter().take(num_pages as usize).collect());
    let mut jobs = Jobs::default();
    jobs.tables = PageTables {
        src: table(),
        dst: table(),
    };
    let wishes = Wishes {
        sums,
        bulk: matches!(entry, Entry::Bulk { .. }).then_some(0),
        most_blocks: None,
    };
    let mut launched = launches(&job, gpu.facts(), wishes)?;
    if sums {
        launched.extend(read_backs(&job, gpu.facts(), wishes)?);
    }
    let names: BTreeSet<_> = launched.into_iter().map(|launch| launch.entry.name()).collect();
    let mut wanted = vec![Checksum::default(); num_pages as usize];
    reference::run(&job, &jobs.tables, &mut twin, &mut wanted);
    jobs.list.push(job);
    let posted = if sums {
        // SAFETY: all pages lie in the two buffers, which nobody else uses and which live until the post was waited for.
        unsafe { queue.post_verified(&jobs, wishes) }
    } else {
        // SAFETY: as above.
        unsafe { queue.post(&jobs, wishes) }
    };
    let no_room = || Error::new(ErrorKind::Internal, TRY, "an idle queue has no room");
    let ticket = posted?.ok_or_else(no_room)?;
    if let Err(error) = queue.wait(ticket) {
        // After a failure of the GPU freeing may fail, too.
        std::mem::forget((src, dst));
        return Err(error);
    }
    let wrong = |what: &str| {
        let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
        let message = format!("{} left a wrong {what}", names.join(" with "));
        Error::new(ErrorKind::Integrity, TRY, message)
            .with_hint("the driver, the image of the kernels or the GPU is broken: please report this")
    };
    let mut found = vec![0; dst.len()];
    dst.read(queue.stream(), 0, &mut found)?;
    if found != twin.0[1].1 {
        return Err(wrong("byte"));
    }
    let wanted: Vec<_> = wanted.into_iter().map(Checksum::value).collect();
    match queue.take_sums(ticket) {
        Some(found) if found != [&wanted[..], &wanted].concat() => Err(wrong("checksum")),
        None if sums => Err(wrong("number of checksums")),
        _ => Ok(names),
    }
}

/// Pieces along two axes, in one order at the source and in the other at the destination, with gaps between pages.
fn drawn_shape(width: u64, chunk_bytes: u64, draw: &mut Draw) -> Shape {
    let [outer, inner] = [1 + draw.below(3), 1 + draw.below(4)];
    let mut side = || Side {
        page_stride: outer * inner * chunk_bytes + draw.below(3) * width,
        parts: 1,
        part_stride: 0,
    };
    let (src, dst) = (side(), side());
    let axis = |count: u64, src: u64, dst: u64| Axis {
        count: count as u32,
        src_stride: src * chunk_bytes,
        dst_stride: dst * chunk_bytes,
        logical_stride: src * chunk_bytes,
    };
    Shape {
        chunk_bytes,
        src,
        dst,
        axes: [axis(outer, inner, 1), axis(inner, 1, outer)],
    }
}

/// The two buffers, on the host.
struct Twin([(u64, Vec<u8>); 2]);

impl Twin {
    fn place(&self, address: u64) -> (usize, usize) {
        let holds = |(start, bytes): &(u64, Vec<u8>)| address >= *start && address - start < bytes.len() as u64;
        let side = usize::from(!holds(&self.0[0]));
        (side, (address - self.0[side].0) as usize)
    }
}

impl reference::Memory for Twin {
    fn read(&self, address: u64, bytes: &mut [u8]) {
        let (side, at) = self.place(address);
        bytes.copy_from_slice(&self.0[side].1[at..at + bytes.len()]);
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        let (side, at) = self.place(address);
        self.0[side].1[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// Numbers that look random, the same for the same seed.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// All pages in some order.
    fn order(&mut self) -> Vec<u32> {
        let mut pages: Vec<u32> = (0..PAGES as u32).collect();
        for at in (1..pages.len()).rev() {
            pages.swap(at, self.below(at as u64 + 1) as usize);
        }
        pages
    }
}
