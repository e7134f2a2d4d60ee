//! From which size of pieces on a copy inside a device goes by the bulk engine.
//!
//! The bulk kernel keeps one warp of a block busy where the others keep eight, and holds a tile in shared memory meanwhile. Whether that is faster, and for
//! which pieces, is measured once for each device of a process, as the ways to the host are; and what it wrote then is looked at before anybody trusts it.

use std::fmt;
use std::sync::PoisonError;

use pdkv_core::Result;

use super::bench::Bench;
use super::brief::{BriefBuffer, free_bytes, has_brief_memory};
use super::memory::{copy_async, fill, put};
use super::numbers::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
use super::pages::Kernels;
use super::stream::Stream;
use crate::kernels::{Axis, Job, Jobs, Lane, PageTables, Shape, Side, Wishes};

/// The sizes of pieces that are measured.
const PIECES: [u64; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Each size is measured so often, and the fastest counts: others compute on the device meanwhile.
const TAKES: u32 = 3;
/// Copies of one measurement. The host posts one while the device is at the last.
const ROUNDS: u32 = 4;
/// How many times faster the bulk engine has to be: less than that is noise, and the kernel that loads and stores is the better known.
const WORTH: f64 = 1.05;
/// Planes that share their two tables, as the layers of a cache do.
const PLANES: u64 = 32;
/// The least and the most that one copy moves, whatever the cache of the device.
const SAMPLE_BYTES: (u64, u64) = (2 << 20, 256 << 20);
/// The part of the device's free memory that both sides of the copy take at most, for some hundredths of a second.
const SHARE: u64 = 16;
/// Bytes after which the contents repeat: of two pages no larger than [`SAMPLE_BYTES`] none begin alike.
const PERIOD: u64 = (1 << 20) + 16;

/// From which size of pieces on the bulk engine is taken inside a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BulkSize {
    /// From pieces of so many bytes on.
    From(u64),
    /// For none, and why.
    Never(&'static str),
    /// For none: it wrote wrong bytes when it was measured.
    Wrong,
}

impl BulkSize {
    /// What was measured on the device of the kernels in this process, now if not before: on a queue of its own, in some hundredths of a
    /// second. Waits.
    ///
    /// # Errors
    /// `Device` when the driver fails, or has no room.
    pub fn of(kernels: &Kernels) -> Result<Self> {
        // Two at a time would measure each other.
        let mut bench = kernels.measuring().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = kernels.bulk_size().get() {
            return Ok(*known);
        }
        let measured = Self::measure(kernels, &mut bench)?;
        Ok(*kernels.bulk_size().get_or_init(|| measured))
    }

    /// The size if it was measured. Does not wait.
    pub(super) fn known(kernels: &Kernels) -> Option<u64> {
        kernels.bulk_size().get().and_then(|known| known.bytes())
    }

    /// The size, if there is one.
    pub fn bytes(self) -> Option<u64> {
        match self {
            Self::From(bytes) => Some(bytes),
            Self::Never(_) | Self::Wrong => None,
        }
    }

    fn measure(kernels: &Kernels, bench: &mut Option<Bench>) -> Result<Self> {
        let context = kernels.context();
        if kernels.facts().capability.0 < 9 {
            return Ok(Self::Never("the GPU has none"));
        }
        if !has_brief_memory(context)? {
            return Ok(Self::Never(
                "not measured: the GPU has no memory in the order of streams",
            ));
        }
        let cache = context.device().attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?;
        let Some(bytes) = sample_bytes(u64::from(cache.unsigned_abs()), free_bytes(context)?) else {
            return Ok(Self::Never("not measured: the GPU has too little free memory"));
        };
        let bench = Bench::kept(bench, kernels)?;
        let stream = bench.stream().clone();
        let found = Self::measure_with(bench, &stream, bytes);
        // Memory of the stream is anybody's again once the stream was waited for.
        stream.synchronize()?;
        found
    }

    fn measure_with(bench: &mut Bench, stream: &Stream, bytes: u64) -> Result<Self> {
        let ends = [BriefBuffer::new(stream, bytes)?, BriefBuffer::new(stream, bytes)?];
        let [src, dst] = ends.each_ref().map(BriefBuffer::address);
        // SAFETY: memory of ours, used in the order of its stream alone.
        unsafe { write_contents(stream, src, bytes) }?;
        let mut samples = Vec::new();
        for piece in PIECES {
            let [there, back] = round_trip([src, dst], bytes, piece);
            // SAFETY: the jobs stay inside the two buffers, which are freed in the order of the stream; so below.
            let read = unsafe { bench.sums(&there) }?;
            let mut best = [f64::INFINITY; 2];
            for _ in 0..TAKES {
                for (best, bulk) in best.iter_mut().zip([None, Some(0)]) {
                    // So that bytes show which nobody wrote, and both find the same in the device's cache.
                    fill(stream, dst, 0, bytes as usize)?;
                    let wishes = Wishes {
                        bulk,
                        ..Wishes::default()
                    };
                    // SAFETY: as above.
                    let taken = bench.time_us(ROUNDS, |queue| unsafe { queue.post(&there, wishes) })?;
                    *best = best.min(taken);
                }
            }
            // SAFETY: as above.
            if unsafe { bench.sums(&back) }? != read {
                return Ok(Self::Wrong);
            }
            samples.push((piece, best[0], best[1]));
        }
        Ok(threshold(&samples).map_or(Self::Never("it was no faster when it was measured"), Self::From))
    }
}

impl fmt::Display for BulkSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::From(bytes) => write!(f, "from pieces of {bytes} bytes on"),
            Self::Never(why) => write!(f, "never: {why}"),
            Self::Wrong => f.write_str("never: it wrote wrong bytes when it was measured"),
        }
    }
}

/// What one copy moves: twice what the device's cache holds, so that memory is measured and not the cache, or as much as there is memory to spare for; `None`
/// where the cache would hold it.
fn sample_bytes(cache: u64, free: u64) -> Option<u64> {
    let (least, most) = SAMPLE_BYTES;
    let mut bytes = (2 * cache).next_power_of_two().clamp(least, most);
    while 2 * bytes > free / SHARE && bytes > least {
        bytes /= 2;
    }
    (cache > 0 && bytes >= cache && 2 * bytes <= free / SHARE).then_some(bytes)
}

/// Writes other bytes to each page.
///
/// # Safety
/// The range must be live device memory that is used in the order of the stream alone.
unsafe fn write_contents(stream: &Stream, at: u64, bytes: u64) -> Result<()> {
    let mut done = PERIOD;
    let word = |number: u64| (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    let first: Vec<u8> = (0..done / 8).flat_map(word).collect();
    // SAFETY: as the caller promises.
    unsafe { put(stream, at, &first) }?;
    while done < bytes {
        let next = done.min(bytes - done);
        // SAFETY: as the caller promises; what is read was written before, and ends where what is written begins.
        unsafe { copy_async(stream, at + done, at, next as usize) }?;
        done += next;
    }
    Ok(())
}

/// All of one memory to another in pages of one piece, which lie in another order there; and the same pages back again.
fn round_trip(ends: [u64; 2], bytes: u64, piece: u64) -> [Jobs; 2] {
    let planes = PLANES.min(bytes / piece);
    let plane_bytes = bytes / planes;
    let num_pages = (plane_bytes / piece) as u32;
    // The number of pages is a power of two, so an odd step visits each once.
    let page = |number: u32| number.wrapping_mul(0x9E37_79B1) % num_pages;
    let tables: [Vec<u32>; 2] = [
        (0..num_pages).map(page).collect(),
        (0..num_pages).rev().map(page).collect(),
    ];
    let side = Side {
        page_stride: piece,
        parts: 1,
        part_stride: 0,
    };
    let one = Axis {
        count: 1,
        src_stride: 0,
        dst_stride: 0,
        logical_stride: 0,
    };
    [[0, 1], [1, 0]].map(|[from, to]| {
        let lane = |plane: u64| Lane {
            src: ends[from] + plane * plane_bytes,
            dst: ends[to] + plane * plane_bytes,
            logical: plane * piece,
            bytes: piece,
        };
        let mut jobs = Jobs::default();
        jobs.list.push(Job {
            shape: Shape {
                chunk_bytes: piece,
                src: side,
                dst: side,
                axes: [one; 2],
            },
            lanes: (0..planes).map(lane).collect(),
            num_pages,
        });
        jobs.tables = PageTables {
            src: Some(tables[from].clone()),
            dst: Some(tables[to].clone()),
        };
        jobs.lasting = true;
        jobs
    })
}

/// From which size on the bulk engine is faster for that size and all larger ones. Samples are (size, kernel, bulk), by size.
fn threshold(samples: &[(u64, f64, f64)]) -> Option<u64> {
    let faster = |&&(_, kernel, bulk): &&(u64, f64, f64)| bulk * WORTH <= kernel;
    samples.iter().rev().take_while(faster).last().map(|(piece, ..)| *piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_engine_is_taken_where_it_is_worth_it_for_all_larger_pieces_too() {
        assert_eq!(threshold(&[(4, 1.0, 2.0), (16, 1.0, 0.96), (64, 1.0, 0.9)]), Some(64));
        assert_eq!(threshold(&[(4, 1.0, 0.5), (16, 1.0, 1.0), (64, 1.0, 0.9)]), Some(64));
        assert_eq!(threshold(&[(4, 1.0, 0.5), (16, 1.0, 0.5)]), Some(4));
        assert_eq!(threshold(&[(4, 1.0, 0.5), (16, 1.0, 0.96)]), None);
        // What was not measured is not faster.
        assert_eq!(threshold(&[(4, f64::INFINITY, f64::NAN)]), None);
        assert_eq!(threshold(&[]), None);
    }

    #[test]
    fn the_sample_is_larger_than_the_cache_and_little_of_the_free_memory() {
        let plenty = 1 << 40;
        assert_eq!(sample_bytes(50 * MIB, plenty), Some(128 * MIB));
        assert_eq!(sample_bytes(126 * MIB, plenty), Some(256 * MIB));
        assert_eq!(sample_bytes(1, plenty), Some(2 * MIB));
        // Both sides together take a sixteenth.
        assert_eq!(sample_bytes(50 * MIB, 4096 * MIB), Some(128 * MIB));
        assert_eq!(sample_bytes(50 * MIB, 4095 * MIB), Some(64 * MIB));
        assert_eq!(sample_bytes(50 * MIB, 2047 * MIB), None);
        assert_eq!(sample_bytes(MIB, 64 * MIB), Some(2 * MIB));
        assert_eq!(sample_bytes(MIB, 63 * MIB), None);
        // A cache that holds all of it, or that nobody knows.
        assert_eq!(sample_bytes(512 * MIB, plenty), None);
        assert_eq!(sample_bytes(0, plenty), None);
    }

    #[test]
    fn every_page_goes_somewhere_else_and_comes_back() {
        for piece in PIECES {
            let bytes = 8 * MIB;
            let [there, back] = round_trip([1 << 40, 1 << 41], bytes, piece);
            let pairs = |jobs: &Jobs| -> Vec<(u64, u64)> {
                let (job, tables) = (&jobs.list[0], &jobs.tables);
                let page = |table: &Option<Vec<u32>>, at: u32| u64::from(table.as_ref().unwrap()[at as usize]) * piece;
                let of_lane = |lane: &Lane| {
                    let (src, dst) = (lane.src, lane.dst);
                    (0..job.num_pages)
                        .map(move |at| (src + page(&tables.src, at), dst + page(&tables.dst, at)))
                        .collect::<Vec<_>>()
                };
                job.lanes.iter().flat_map(of_lane).collect()
            };
            let (out, home) = (pairs(&there), pairs(&back));
            assert_eq!(home, out.iter().map(|&(src, dst)| (dst, src)).collect::<Vec<_>>());
            for (base, mut side) in [
                (1 << 40, out.iter().map(|pair| pair.0).collect::<Vec<u64>>()),
                (1 << 41, out.iter().map(|pair| pair.1).collect()),
            ] {
                side.sort_unstable();
                assert_eq!(
                    side,
                    (0..bytes / piece)
                        .map(|number| base + number * piece)
                        .collect::<Vec<_>>()
                );
            }
        }
    }
}
