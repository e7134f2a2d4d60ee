//! Which kernel copies a job, with how many threads, in how many launches.

use pdkv_core::{Error, ErrorKind, Result};

use super::entry::Entry;
use super::job::{Job, Shape};
use super::view::{FastDiv, View};

/// Most bytes of a tile of the bulk kernel: large enough that its single thread keeps up.
const BULK_TILE_BYTES: u64 = 16 << 10;
/// What a block of the bulk kernel needs of shared memory beside its tiles: barriers, and what the driver keeps.
const BULK_SHARED_BYTES: u64 = 2 << 10;
/// Most tiles that a block keeps, as in `cuda/bulk.cuh`.
const MOST_STAGES: u64 = 8;
/// Pieces smaller than this are not worth an order to the bulk engine.
const BULK_FROM_BYTES: u64 = 2 << 10;
/// Work of a launch is numbered in 32 bits.
const MOST_ITEMS: u64 = u32::MAX as u64;

/// What a launch needs to know of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Compute capability, as in `(9, 0)`.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Threads that a multiprocessor can hold.
    pub threads_per_multiprocessor: u32,
    /// Shared memory of a multiprocessor.
    pub shared_bytes: u32,
    /// Shared memory that one block can ask for.
    pub block_shared_bytes: u32,
}

/// What the caller wants of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// Add up a checksum for each page.
    pub sums: bool,
    /// From pieces of how many bytes on the bulk engine copies, where the device has one and can; never without. Which is faster is measured, not
    /// known.
    pub bulk: Option<u64>,
    /// No more blocks than these: a copy that a slow link holds up anyway leaves the rest of the device to others.
    pub most_blocks: Option<u32>,
}

/// One launch of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel.
    pub entry: Entry,
    /// Blocks.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
    /// Shared memory of a block.
    pub shared_bytes: u32,
    /// The first of the job's lanes; the view has this many from there on.
    pub first_lane: u32,
    /// The view, its pointers still 0.
    pub view: View,
}

/// The launches of a job: one, unless its work cannot be numbered in 32 bits. None for a job of no pages or lanes.
///
/// They write different bytes and may run in any order; a flag belongs to the last one, once the others are over.
///
/// # Errors
/// `Layout` for a page that cannot be numbered in 32 bits, a job with empty pieces or axes, or a lane with longer pieces than its job.
pub fn launches(job: &Job, device: &DeviceFacts, wishes: Wishes) -> Result<Vec<Launch>> {
    let mut list = Vec::new();
    each_of(job, device, wishes, Choice::of, |launch| list.push(launch))?;
    Ok(list)
}

/// The launches that read back what a job has placed: behind those of [`launches`], with the same lanes and tables, they find the same sums
/// where every byte lies as it was read. They add them up whatever was wished.
///
/// # Errors
/// As [`launches`].
pub fn read_backs(job: &Job, device: &DeviceFacts, wishes: Wishes) -> Result<Vec<Launch>> {
    let mut list = Vec::new();
    each_of(job, device, wishes, Choice::read_back, |launch| list.push(launch))?;
    Ok(list)
}

/// Calls `f` with each launch of jobs and its job's number; behind all that copy, if they are to be verified, with those that read back.
///
/// # Errors
/// As [`launches`].
pub(crate) fn each_of_jobs(
    jobs: &[Job],
    device: &DeviceFacts,
    wishes: Wishes,
    verified: bool,
    mut f: impl FnMut(usize, Launch),
) -> Result<()> {
    for (number, job) in jobs.iter().enumerate() {
        each_of(job, device, wishes, Choice::of, |launch| f(number, launch))?;
    }
    for (number, job) in jobs.iter().enumerate().filter(|_| verified) {
        each_of(job, device, wishes, Choice::read_back, |launch| f(number, launch))?;
    }
    Ok(())
}

/// Calls `f` with each launch of a job for which a kernel is chosen so.
///
/// # Errors
/// As [`launches`]; `f` was not called then.
fn each_of(
    job: &Job,
    device: &DeviceFacts,
    wishes: Wishes,
    choose: impl FnOnce(&Job, &DeviceFacts, Wishes) -> Choice,
    mut f: impl FnMut(Launch),
) -> Result<()> {
    let shape = &job.shape;
    if job.lanes.is_empty() || job.num_pages == 0 {
        return Ok(());
    }
    let empty = shape.axes.iter().any(|axis| axis.count == 0) || shape.src.parts == 0 || shape.dst.parts == 0;
    if shape.chunk_bytes == 0 || empty {
        return Err(refuse("a piece, an axis or an entry of a job is empty".to_owned()));
    }
    if let Some(lane) = job.lanes.iter().find(|lane| lane.bytes > shape.chunk_bytes) {
        let (longer, longest) = (lane.bytes, shape.chunk_bytes);
        return Err(refuse(format!(
            "a lane has pieces of `{longer}` bytes, its job says `{longest}`"
        )));
    }
    let choice = choose(job, device, wishes);
    let tiles = shape.chunk_bytes.div_ceil(u64::from(choice.tile_bytes));
    let page = tiles
        .checked_mul(shape.pieces())
        .filter(|&items| items <= MOST_ITEMS)
        .ok_or_else(|| {
            refuse(format!(
                "a page of `{}` pieces of `{}` bytes is too large for one launch",
                shape.pieces(),
                shape.chunk_bytes
            ))
        })?;
    let pages = (MOST_ITEMS / page).min(u64::from(job.num_pages)) as u32;
    let lanes = match pages {
        pages if pages == job.num_pages => (MOST_ITEMS / (page * u64::from(pages))).min(job.lanes.len() as u64),
        _ => 1,
    };
    for first_lane in (0..job.lanes.len() as u64).step_by(lanes as usize) {
        let num_lanes = lanes.min(job.lanes.len() as u64 - first_lane) as u32;
        for first_page in (0..job.num_pages).step_by(pages as usize) {
            let num_pages = pages.min(job.num_pages - first_page);
            let items = (page * u64::from(num_pages) * u64::from(num_lanes)) as u32;
            f(Launch {
                entry: choice.entry,
                grid: choice
                    .grid(items, device)
                    .min(wishes.most_blocks.unwrap_or(u32::MAX))
                    .max(1),
                block: choice.entry.block(),
                shared_bytes: choice.stages * if choice.stages > 0 { choice.tile_bytes } else { 0 },
                first_lane: first_lane as u32,
                view: View {
                    tiles: FastDiv::by(tiles as u32),
                    pages: FastDiv::by(num_pages),
                    first_page,
                    num_lanes,
                    num_items: items,
                    tile_bytes: choice.tile_bytes,
                    stages: choice.stages,
                    ..View::of(shape)
                },
            });
        }
    }
    Ok(())
}

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::Layout, "copy pages", message)
}

impl View {
    /// The parts that only depend on the shape.
    fn of(shape: &Shape) -> Self {
        let [outer, inner] = shape.axes;
        Self {
            src_page_stride: shape.src.page_stride,
            dst_page_stride: shape.dst.page_stride,
            src_part_stride: shape.src.part_stride,
            dst_part_stride: shape.dst.part_stride,
            outer_src_stride: outer.src_stride,
            outer_dst_stride: outer.dst_stride,
            outer_logical_stride: outer.logical_stride,
            inner_src_stride: inner.src_stride,
            inner_dst_stride: inner.dst_stride,
            inner_logical_stride: inner.logical_stride,
            inner: FastDiv::by(inner.count),
            outer: FastDiv::by(outer.count),
            src_parts: FastDiv::by(shape.src.parts),
            dst_parts: FastDiv::by(shape.dst.parts),
            ..Self::default()
        }
    }
}

impl Entry {
    /// The most dynamic shared memory that a launch of the bulk kernel asks for on a device.
    pub(crate) fn most_shared_bytes(self, device: &DeviceFacts) -> u32 {
        bulk_room(self, device).unwrap_or(0).min(MOST_STAGES * BULK_TILE_BYTES) as u32
    }
}

/// Shared memory for the tiles of a block of the bulk kernel.
fn bulk_room(entry: Entry, device: &DeviceFacts) -> Option<u64> {
    (u64::from(device.shared_bytes) / u64::from(entry.resident()))
        .min(u64::from(device.block_shared_bytes))
        .checked_sub(BULK_SHARED_BYTES)
}

/// A kernel and the tiles it gets.
struct Choice {
    entry: Entry,
    tile_bytes: u32,
    stages: u32,
}

impl Choice {
    fn of(job: &Job, device: &DeviceFacts, Wishes { sums, bulk, .. }: Wishes) -> Self {
        let width = job.vector_bytes(sums);
        let chunk = job.shape.chunk_bytes;
        if width == 16 {
            let wished = bulk.is_some_and(|from| chunk >= from);
            if let Some(choice) = Self::bulk(chunk, device, sums).filter(|_| wished) {
                return choice;
            }
            if let Some((entry, tile_bytes)) = Entry::tiles_for(chunk, sums) {
                return Self {
                    entry,
                    tile_bytes,
                    stages: 0,
                };
            }
        }
        Self {
            entry: Entry::Vectors { width, sums },
            tile_bytes: width,
            stages: 0,
        }
    }

    fn read_back(job: &Job, _: &DeviceFacts, _: Wishes) -> Self {
        let width = job.vector_bytes(true);
        Self {
            entry: Entry::ReadBack { width },
            tile_bytes: width,
            stages: 0,
        }
    }

    /// The bulk kernel, where there is one and it is worth it.
    fn bulk(chunk: u64, device: &DeviceFacts, sums: bool) -> Option<Self> {
        let entry = Entry::Bulk { sums };
        let room = bulk_room(entry, device)?;
        // One is loaded while another is stored, so two have to fit.
        let largest = BULK_TILE_BYTES.min(room / 2 / 16 * 16);
        if device.capability.0 < 9 || chunk < BULK_FROM_BYTES || largest < BULK_FROM_BYTES {
            return None;
        }
        // Tiles of one size, as far as that goes.
        let tiles = chunk.div_ceil(largest);
        let tile_bytes = chunk.div_ceil(tiles).next_multiple_of(16);
        Some(Self {
            entry,
            tile_bytes: tile_bytes as u32,
            stages: (room / tile_bytes).min(MOST_STAGES) as u32,
        })
    }

    /// As many blocks as are busy at once, no more than there is work for.
    fn grid(&self, items: u32, device: &DeviceFacts) -> u32 {
        let held = device.threads_per_multiprocessor / self.entry.block();
        let most = device.multiprocessors * self.entry.resident().min(held).max(1);
        items.div_ceil(self.entry.round()).clamp(1, most.max(1))
    }
}

#[cfg(test)]
#[path = "launch_tests.rs"]
mod tests;
