//! Copies in a row, each one's source on its way into the cache while the one before is moved.
//!
//! A scattered run begins with cache misses that no hardware prefetcher foresees, because it does not
//! look past a page. Asking for the first kilobyte one run ahead hides them: about a tenth for runs of
//! 16 to 64 KiB by `benches/copy.rs`, nothing to speak of for single pages and for very long runs.

use pdkv_core::Result;

use super::{copy, copy_fence};
use crate::region::HostRegion;

/// How much of a run is asked for ahead; what follows, the hardware foresees.
#[cfg(target_arch = "x86_64")]
const AHEAD_BYTES: usize = 1024;

/// A sequence of copies by one thread: push every run, then [`finish`](Self::finish).
///
/// A run is moved when the next one is pushed, so the last one waits for `finish`; a pipe that is
/// dropped instead leaves it unmoved.
#[derive(Debug, Default)]
pub struct CopyPipe<'a> {
    pending: Option<Run<'a>>,
    bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Run<'a> {
    dst: &'a HostRegion,
    dst_offset: u64,
    src: &'a HostRegion,
    src_offset: u64,
    len: u64,
}

impl Run<'_> {
    fn copy(self) -> Result<u64> {
        copy(self.dst, self.dst_offset, self.src, self.src_offset, self.len)?;
        Ok(self.len)
    }
}

impl<'a> CopyPipe<'a> {
    /// An empty pipe.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes one run and moves the one before it.
    ///
    /// # Errors
    /// `Region` when a range does not lie inside, or the destination is read-only: of this run, which is
    /// not taken then.
    #[inline]
    pub fn push(
        &mut self,
        dst: &'a HostRegion,
        dst_offset: u64,
        src: &'a HostRegion,
        src_offset: u64,
        len: u64,
    ) -> Result<()> {
        let source = src.source("copy", src_offset, len)?;
        dst.target("copy", dst_offset, len)?;
        fetch(source, len as usize);
        let run = Run {
            dst,
            dst_offset,
            src,
            src_offset,
            len,
        };
        if let Some(before) = self.pending.replace(run) {
            self.bytes += before.copy()?;
        }
        Ok(())
    }

    /// Moves the last run, makes all of them visible to other threads and processes, and tells how many
    /// bytes were moved.
    ///
    /// # Errors
    /// None that [`push`](Self::push) has not told already.
    pub fn finish(mut self) -> Result<u64> {
        if let Some(last) = self.pending.take() {
            self.bytes += last.copy()?;
        }
        copy_fence();
        Ok(self.bytes)
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn fetch(source: *const u8, len: usize) {
    for line in (0..len.min(AHEAD_BYTES)).step_by(64) {
        let at = source.wrapping_add(line).cast();
        // SAFETY: a hint that reads nothing and never faults; SSE belongs to every x86-64 processor.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn fetch(_source: *const u8, _len: usize) {}

#[cfg(test)]
mod tests {
    use pdkv_core::ErrorKind;
    use proptest::prelude::*;

    use super::*;
    use crate::HugePages;

    proptest! {
        #[test]
        fn a_pipe_leaves_what_single_copies_leave(
            runs in proptest::collection::vec((0_u64..30_000, 0_u64..30_000, 0_u64..5000), 0..20),
        ) {
            let pool = || HostRegion::allocate(40_000, HugePages::Never).unwrap();
            let (src, piped, single) = (pool(), pool(), pool());
            let bytes: Vec<u8> = (0..40_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 23) as u8).collect();
            src.write_at(0, &bytes).unwrap();
            let mut pipe = CopyPipe::new();
            for &(to, from, len) in &runs {
                pipe.push(&piped, to, &src, from, len).unwrap();
                copy(&single, to, &src, from, len).unwrap();
            }
            prop_assert_eq!(pipe.finish().unwrap(), runs.iter().map(|run| run.2).sum::<u64>());
            let read = |region: &HostRegion| {
                let mut bytes = vec![0; 40_000];
                region.read_at(0, &mut bytes).unwrap();
                bytes
            };
            prop_assert!(read(&piped) == read(&single));
        }
    }

    #[test]
    fn a_bad_run_is_refused_and_the_others_still_move() {
        let region = HostRegion::allocate(8192, HugePages::Never).unwrap();
        region.write_at(0, b"bytes").unwrap();
        let mut pipe = CopyPipe::new();
        pipe.push(&region, 4096, &region, 0, 5).unwrap();
        assert_eq!(
            pipe.push(&region, 8190, &region, 0, 5).unwrap_err().kind(),
            ErrorKind::Region
        );
        assert_eq!(
            pipe.push(&region, 0, &region, u64::MAX, 5).unwrap_err().kind(),
            ErrorKind::Region
        );
        assert_eq!(pipe.finish().unwrap(), 5);
        let mut got = [0; 5];
        region.read_at(4096, &mut got).unwrap();
        assert_eq!(&got, b"bytes");
    }
}
