//! Putting the runs of a strided tensor together, in order: for runs so short that handing each of them to a transport
//! would cost more than copying it.

use pdkv_core::pipe::Strided;
use pdkv_core::{Error, ErrorKind, Result};

use crate::region::HostRegion;

/// Copies runs `first..first + count` of `at`, counted from the first byte of `src`, one after the other into `dst`.
///
/// # Errors
/// `Region` when a range does not lie inside or the destination is read-only.
pub fn gather(dst: &HostRegion, dst_offset: u64, src: &HostRegion, at: &Strided, first: u64, count: u64) -> Result<()> {
    check(src, at, first, count)?;
    let target = dst.target("gather", dst_offset, count.saturating_mul(at.run_bytes()))?;
    collect(target, src, at, first, count)
}

/// Copies all of `at` into `dst`, which must be just as long.
///
/// # Errors
/// As [`gather`].
pub fn gather_into(dst: &mut [u8], src: &HostRegion, at: &Strided) -> Result<()> {
    check(src, at, 0, at.runs())?;
    if dst.len() as u64 != at.nbytes() {
        let text = format!("`{}` bytes for a tensor of `{}`", dst.len(), at.nbytes());
        return Err(Error::new(ErrorKind::Region, "gather", text));
    }
    collect(dst.as_mut_ptr(), src, at, 0, at.runs())
}

fn check(src: &HostRegion, at: &Strided, first: u64, count: u64) -> Result<()> {
    src.source("gather", 0, at.reach())?;
    if first.checked_add(count).is_none_or(|end| end > at.runs()) {
        let text = format!("runs `{first}` + `{count}` of `{}`", at.runs());
        return Err(Error::new(ErrorKind::Region, "gather", text));
    }
    Ok(())
}

/// `target` must be valid for `count` runs; the caller has checked that, and [`check`] the source.
fn collect(mut target: *mut u8, src: &HostRegion, at: &Strided, first: u64, count: u64) -> Result<()> {
    let (width, step) = at.dims().last().copied().unwrap_or((1, 0));
    let row = match at.run_bytes() {
        1 => row::<1>,
        2 => row::<2>,
        4 => row::<4>,
        8 => row::<8>,
        16 => row::<16>,
        _ => row::<0>,
    };
    let (mut next, end) = (first, first + count);
    while next < end {
        let runs = (width - next % width).min(end - next);
        let offset = at.offsets(next).next().unwrap_or(0);
        let source = src.source("gather", offset, at.run_bytes())?;
        row(target, source, step, runs, at.run_bytes() as usize);
        target = target.wrapping_add((runs * at.run_bytes()) as usize);
        next += runs;
    }
    Ok(())
}

/// Copies `runs` runs that lie `step` bytes apart. With an `N` that is not 0, a run has that many bytes.
fn row<const N: usize>(target: *mut u8, source: *const u8, step: i64, runs: u64, run_bytes: usize) {
    let len = if N == 0 { run_bytes } else { N };
    for run in 0..runs as usize {
        let from = source.wrapping_offset(step as isize * run.cast_signed());
        let to = target.wrapping_add(run * len);
        // SAFETY: `check` has seen that every run of the tensor lies in the live source region, and its callers that
        // the target holds all runs asked for; the target is an exclusive slice or region memory, which nobody holds
        // a reference into. Should the two overlap, `copy` allows it.
        unsafe { std::ptr::copy(from, to, len) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::HugePages;

    proptest! {
        #[test]
        fn what_is_gathered_is_what_a_walk_reads(
            dims in prop::collection::vec((0_u64..7, -9_i64..10), 0..5),
            itemsize in prop::sample::select(vec![1_u64, 2, 3, 4, 8, 16, 24]),
            cut in any::<prop::sample::Index>(),
        ) {
            let (shape, strides): (Vec<u64>, Vec<i64>) = dims.into_iter().unzip();
            let at = Strided::new(&shape, &strides, itemsize).unwrap();
            let src = HostRegion::allocate(at.reach().max(1), HugePages::Never).unwrap();
            let bytes: Vec<u8> = (0..at.reach() as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 23) as u8).collect();
            src.write_at(0, &bytes).unwrap();
            let want: Vec<u8> = at
                .offsets(0)
                .flat_map(|from| bytes[from as usize..(from + at.run_bytes()) as usize].to_vec())
                .collect();
            let mut got = vec![0; want.len()];
            gather_into(&mut got, &src, &at).unwrap();
            prop_assert!(got == want);

            let dst = HostRegion::allocate(at.nbytes() + 8, HugePages::Never).unwrap();
            let first = cut.index(at.runs() as usize + 1) as u64;
            gather(&dst, 8, &src, &at, first, at.runs() - first).unwrap();
            let skipped = (first * at.run_bytes()) as usize;
            let mut got = vec![0; want.len() - skipped];
            dst.read_at(8, &mut got).unwrap();
            prop_assert!(got == want[skipped..]);
        }
    }

    #[test]
    fn what_lies_outside_is_refused() {
        let region = HostRegion::allocate(4096, HugePages::Never).unwrap();
        let at = Strided::new(&[64, 2], &[64, 2], 1).unwrap();
        assert!(
            gather(&region, 0, &region, &at, 0, 129).is_err(),
            "more runs than there are"
        );
        assert!(
            gather(&region, 4096 - 100, &region, &at, 0, 128).is_err(),
            "past the target"
        );
        let long = Strided::new(&[65, 2], &[64, 2], 1).unwrap();
        assert!(gather(&region, 0, &region, &long, 0, 1).is_err(), "past the source");
        assert!(
            gather_into(&mut [0; 127], &region, &at).is_err(),
            "a slice of another length"
        );
    }
}
