//! The plain scattered copy: what any path through host memory has to do at the least.

use std::time::Duration;

use pdkv_core::Result;

use super::{same_length, timed};
use crate::region::HostRegion;

/// Copies blocks from one region to another with the C library's copy and tells how long it took.
///
/// # Errors
/// `Region` when a block does not lie inside, `Config` for lists of unequal length or a bad thread count.
pub fn scattered_copy(
    dst: &HostRegion,
    dst_offsets: &[u64],
    src: &HostRegion,
    src_offsets: &[u64],
    block_bytes: u64,
    threads: usize,
) -> Result<Duration> {
    const OPERATION: &str = "limit_copy";
    same_length(OPERATION, dst_offsets.len(), src_offsets.len())?;
    for (&to, &from) in dst_offsets.iter().zip(src_offsets) {
        dst.target(OPERATION, to, block_bytes)?;
        src.source(OPERATION, from, block_bytes)?;
    }
    let (dst_base, src_base) = (dst.address() as usize, src.address() as usize);
    timed(OPERATION, dst_offsets.len(), threads, |_, part| {
        for (&to, &from) in dst_offsets[part.clone()].iter().zip(&src_offsets[part]) {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(dst_base + to as usize);
            let from = std::ptr::with_exposed_provenance::<u8>(src_base + from as usize);
            // SAFETY: every block was checked above against the two live regions; `copy` allows overlap.
            unsafe { std::ptr::copy(from, to, block_bytes as usize) };
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use pdkv_core::ErrorKind;

    use super::*;
    use crate::HugePages;
    use crate::pattern::{Pages, fill, verify};

    #[test]
    fn blocks_land_where_the_lists_say_with_any_number_of_threads() {
        let pool = || HostRegion::allocate(64 * 4096, HugePages::Never).unwrap();
        let (src, dst) = (pool(), pool());
        let keys: Vec<u64> = (0..64).map(|i| i << 48).collect();
        let from: Vec<u64> = (0..64).map(|i| i * 4096).collect();
        fill(&src, &Pages::new(&from, &keys, 4096).unwrap(), 1).unwrap();
        let to: Vec<u64> = (0..64).map(|i| i * 29 % 64 * 4096).collect();
        for threads in [1, 2, 5] {
            dst.fill(0, dst.len(), 0).unwrap();
            scattered_copy(&dst, &to, &src, &from, 4096, threads).unwrap();
            let moved = Pages::new(&to, &keys, 4096).unwrap();
            assert!(verify(&dst, &moved, 1).unwrap().is_empty());
        }
    }

    #[test]
    fn bad_lists_are_refused() {
        let region = HostRegion::allocate(8192, HugePages::Never).unwrap();
        let run = |to: &[u64], from: &[u64], threads| {
            scattered_copy(&region, to, &region, from, 4096, threads)
                .unwrap_err()
                .kind()
        };
        assert_eq!(run(&[0], &[], 1), ErrorKind::Config);
        assert_eq!(run(&[0], &[4097], 1), ErrorKind::Region);
        assert_eq!(run(&[0], &[0], 0), ErrorKind::Config);
        assert_eq!(run(&[0], &[0], 10_000), ErrorKind::Config);
    }
}
