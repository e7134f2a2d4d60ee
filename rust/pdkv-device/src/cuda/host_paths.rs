//! How bytes go between the host and a device: by a kernel that reaches over the link, or by the driver's batched copies.
//!
//! A kernel takes pieces of any size and keeps multiprocessors busy that an LLM engine would like to have; copy engines take none of them, and a
//! while for each piece. Which is faster for which pieces is measured once for each device of a process.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::PoisonError;

use pdkv_core::Result;

use super::batch::has_batch;
use super::bench::Bench;
use super::memory::{DeviceBuffer, PinnedBuffer};
use super::pages::Kernels;
use crate::kernels::{Jobs, Run, Wishes};

/// Blocks that a kernel gets for a copy over the link: 16 of them have 512 KiB under way, more than any link holds.
pub const LINK_BLOCKS: u32 = 16;
/// What one measured copy moves.
const SAMPLE_BYTES: u64 = 2 << 20;
/// The sizes of pieces that are measured.
const PIECES: [u64; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// Each is measured so often, and the fastest counts.
const ROUNDS: usize = 2;
/// By how much the kernel has to be faster to be worth the multiprocessors that it takes.
const WORTH: f64 = 1.25;

/// A way between the host and a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostPath {
    /// A kernel.
    Kernel,
    /// The driver's batched copies.
    Batch,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostDirection {
    /// From the host to the device.
    ToDevice,
    /// From the device to the host.
    ToHost,
}

/// From which size of pieces on the batch is taken, in each direction; never where there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostPaths {
    to_device: Option<u64>,
    to_host: Option<u64>,
}

impl HostPaths {
    /// One path for everything.
    pub fn always(path: HostPath) -> Self {
        let from = match path {
            HostPath::Kernel => None,
            HostPath::Batch => Some(0),
        };
        Self {
            to_device: from,
            to_host: from,
        }
    }

    /// What was measured on the device of the kernels in this process, now if not before: on a queue of its own, in some hundredths of a
    /// second. Waits.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn of(kernels: &Kernels) -> Result<Self> {
        // Two at a time would measure each other.
        let mut bench = kernels.measuring().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = Self::known(kernels) {
            return Ok(known);
        }
        let measured = Self::measure(kernels, &mut bench)?;
        Ok(*kernels.host_paths().get_or_init(|| measured))
    }

    /// What was measured, if it was. Does not wait.
    pub(super) fn known(kernels: &Kernels) -> Option<Self> {
        kernels.host_paths().get().copied()
    }

    /// The path for so many bytes in so many pieces.
    pub fn choose(&self, direction: HostDirection, bytes: u64, pieces: u64) -> HostPath {
        let from = match direction {
            HostDirection::ToDevice => self.to_device,
            HostDirection::ToHost => self.to_host,
        };
        match from {
            Some(from) if bytes / pieces.max(1) >= from => HostPath::Batch,
            _ => HostPath::Kernel,
        }
    }

    fn measure(kernels: &Kernels, bench: &mut Option<Bench>) -> Result<Self> {
        let context = kernels.context();
        if !has_batch(context) {
            return Ok(Self::always(HostPath::Kernel));
        }
        let bench = Bench::kept(bench, kernels)?;
        // Kept for good, some MiB: freeing would wait for all that an LLM engine has asked of the device, and keep it from asking more.
        let device = ManuallyDrop::new(DeviceBuffer::new(context, SAMPLE_BYTES as usize)?);
        let host = ManuallyDrop::new(PinnedBuffer::new(context, SAMPLE_BYTES as usize)?);
        let mut from = |src: u64, dst: u64| -> Result<Option<u64>> {
            let mut samples = Vec::new();
            for piece in PIECES {
                let runs = scattered(src, dst, piece);
                let mut time = |path| best_us(bench, &runs, path);
                samples.push((piece, time(HostPath::Kernel)?, time(HostPath::Batch)?));
            }
            Ok(threshold(&samples))
        };
        Ok(Self {
            to_device: from(host.address(), device.address())?,
            to_host: from(device.address(), host.address())?,
        })
    }
}

impl fmt::Display for HostPaths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = |from: Option<u64>| match from {
            Some(from) => format!("in batches from pieces of {from} bytes on"),
            None => "by a kernel".to_owned(),
        };
        write!(f, "{} to the GPU, {} back", way(self.to_device), way(self.to_host))
    }
}

/// Pieces that continue one another on neither side.
fn scattered(src: u64, dst: u64, piece: u64) -> Vec<Run> {
    let count = SAMPLE_BYTES / piece;
    // The number of pieces is a power of two, so any odd step visits each once.
    let run = |number: u64| Run {
        src: src + number * 7 % count * piece,
        dst: dst + number * 5 % count * piece,
        bytes: piece,
    };
    (0..count).map(run).collect()
}

fn best_us(bench: &mut Bench, runs: &[Run], path: HostPath) -> Result<f64> {
    let mut jobs = Jobs::default();
    jobs.fill_runs(runs)?;
    let wishes = Wishes {
        most_blocks: Some(LINK_BLOCKS),
        ..Wishes::default()
    };
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let taken = bench.time_us(1, |queue| match path {
            // SAFETY: the runs lie in buffers of the caller's, which are never freed.
            HostPath::Batch => unsafe { queue.post_batch(runs) }.map(Some),
            // SAFETY: as above.
            HostPath::Kernel => unsafe { queue.post(&jobs, wishes) },
        })?;
        best = best.min(taken);
    }
    Ok(best)
}

/// From which size on the batch is good enough for that size and all larger ones. Samples are (size, kernel, batch), by size.
fn threshold(samples: &[(u64, f64, f64)]) -> Option<u64> {
    let good = |&&(_, kernel, batch): &&(u64, f64, f64)| batch <= kernel * WORTH;
    samples.iter().rev().take_while(good).last().map(|(piece, ..)| *piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_batch_is_taken_where_it_is_good_enough_for_all_larger_pieces_too() {
        assert_eq!(
            threshold(&[(4, 1.0, 9.0), (16, 1.0, 1.3), (64, 1.0, 1.2), (256, 1.0, 1.0)]),
            Some(64)
        );
        assert_eq!(threshold(&[(4, 1.0, 1.0), (16, 1.0, 9.0), (64, 1.0, 1.0)]), Some(64));
        assert_eq!(threshold(&[(4, 1.0, 0.5), (16, 1.0, 0.5)]), Some(4));
        assert_eq!(threshold(&[(4, 1.0, 1.0), (16, 1.0, 2.0)]), None);
        assert_eq!(threshold(&[]), None);
    }

    #[test]
    fn pieces_decide_and_a_path_can_be_forced() {
        let paths = HostPaths {
            to_device: Some(64),
            to_host: None,
        };
        assert_eq!(
            paths.to_string(),
            "in batches from pieces of 64 bytes on to the GPU, by a kernel back"
        );
        assert_eq!(paths.choose(HostDirection::ToDevice, 640, 10), HostPath::Batch);
        assert_eq!(paths.choose(HostDirection::ToDevice, 639, 10), HostPath::Kernel);
        assert_eq!(paths.choose(HostDirection::ToHost, 1 << 40, 1), HostPath::Kernel);
        assert_eq!(
            HostPaths::always(HostPath::Batch).choose(HostDirection::ToHost, 0, 0),
            HostPath::Batch
        );
        assert_eq!(
            HostPaths::always(HostPath::Kernel).choose(HostDirection::ToDevice, 1 << 40, 1),
            HostPath::Kernel
        );
    }

    #[test]
    fn measured_pieces_are_all_there_once_and_apart() {
        for piece in PIECES {
            let runs = scattered(1 << 40, 1 << 41, piece);
            for (side, base) in [
                (runs.iter().map(|run| run.src).collect::<Vec<_>>(), 1_u64 << 40),
                (runs.iter().map(|run| run.dst).collect(), 1 << 41),
            ] {
                assert!(side.windows(2).all(|pair| pair[0] + piece != pair[1]));
                let mut sorted = side;
                sorted.sort_unstable();
                let expected: Vec<_> = (0..SAMPLE_BYTES / piece).map(|number| base + number * piece).collect();
                assert_eq!(sorted, expected);
            }
        }
    }
}
