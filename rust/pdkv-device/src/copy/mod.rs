//! Copies between regions: plain for small runs, non-temporal stores for large ones where the
//! processor has them.
//!
//! A streamed run does not read its destination into the cache first, which is a third of the memory
//! traffic of a plain copy. The threshold and the choice of width are measured, see
//! `docs/performance.md`. Other architectures take the plain path.

mod gather;
#[cfg(target_arch = "x86_64")]
mod nontemporal;
mod pipe;

use std::sync::OnceLock;

use pdkv_core::Result;

pub use gather::{gather, gather_into};
pub use pipe::CopyPipe;

use crate::region::HostRegion;

/// How the bytes of a large run are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyPath {
    /// The C library's `memcpy`.
    Plain,
    /// 32-byte non-temporal stores.
    Avx2,
    /// 64-byte non-temporal stores.
    Avx512,
}

impl CopyPath {
    /// The lowercase name shown to users.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Whether this processor can run it.
    pub fn available(self) -> bool {
        match self {
            Self::Plain => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }
}

/// Runs shorter than this are copied plainly: below, the unaligned ends and the drain of the
/// write-combining buffers cost more than the saved reads. Measured with `benches/copy.rs` on a Sapphire
/// Rapids core: 256 and 512 bytes lose or are even, and from 1 KiB on 64-byte stores win for private and
/// shared memory alike.
pub(crate) const STREAM_FROM_BYTES: u64 = 1024;

/// The path [`copy`] takes for large runs on this machine.
pub fn copy_path() -> CopyPath {
    static PATH: OnceLock<CopyPath> = OnceLock::new();
    *PATH.get_or_init(|| {
        [CopyPath::Avx512, CopyPath::Avx2]
            .into_iter()
            .find(|path| path.available())
            .unwrap_or(CopyPath::Plain)
    })
}

/// Copies `len` bytes from one region to another.
///
/// Streamed bytes are visible to other threads and processes only after [`copy_fence`], which the
/// copying thread calls once after the last run and before it tells anybody.
///
/// # Errors
/// `Region` when either range does not lie inside, or the destination is read-only.
#[inline]
pub fn copy(dst: &HostRegion, dst_offset: u64, src: &HostRegion, src_offset: u64, len: u64) -> Result<()> {
    let path = if len < STREAM_FROM_BYTES {
        CopyPath::Plain
    } else {
        copy_path()
    };
    copy_with(path, dst, dst_offset, src, src_offset, len)
}

/// [`copy`] on a path of the caller's choice, for measuring; a path this processor lacks is plain.
///
/// # Errors
/// As [`copy`].
#[inline]
pub fn copy_with(
    path: CopyPath,
    dst: &HostRegion,
    dst_offset: u64,
    src: &HostRegion,
    src_offset: u64,
    len: u64,
) -> Result<()> {
    let source = src.source("copy", src_offset, len)?;
    let target = dst.target("copy", dst_offset, len)?;
    let len = len as usize;
    #[cfg(target_arch = "x86_64")]
    {
        let apart = source.addr().abs_diff(target.addr()) >= len;
        if apart && path == CopyPath::Avx512 && path.available() {
            // SAFETY: both ranges were just checked against live regions, they do not overlap, and the
            // processor has AVX-512F.
            unsafe { nontemporal::copy_avx512(target, source, len) };
            return Ok(());
        }
        if apart && path == CopyPath::Avx2 && path.available() {
            // SAFETY: both ranges were just checked against live regions, they do not overlap, and the
            // processor has AVX2.
            unsafe { nontemporal::copy_avx2(target, source, len) };
            return Ok(());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = path;
    // SAFETY: both ranges were just checked against live regions; `copy` allows them to overlap.
    unsafe { std::ptr::copy(source, target, len) };
    Ok(())
}

/// Orders all copies of this thread before whatever it writes next.
#[inline]
pub fn copy_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE, of which the fence is part, belongs to every x86-64 processor.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    };
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use pdkv_core::ErrorKind;
    use proptest::prelude::*;

    use super::*;
    use crate::HugePages;

    const PATHS: [CopyPath; 3] = [CopyPath::Plain, CopyPath::Avx2, CopyPath::Avx512];
    const REGION: u32 = 96 << 10;

    proptest! {
        #[test]
        fn every_path_moves_exactly_the_range(
            dst_offset in 0_u64..300, src_offset in 0_u64..300,
            len in prop_oneof![0_u64..9000, 9000_u64..90_000, (1_u64..5).prop_map(|pages| pages << 14)],
            which in 0_usize..3,
        ) {
            let src = HostRegion::allocate(REGION.into(), HugePages::Never).unwrap();
            let dst = HostRegion::allocate(REGION.into(), HugePages::Never).unwrap();
            let bytes: Vec<u8> = (0..REGION).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            src.write_at(0, &bytes).unwrap();
            dst.fill(0, REGION.into(), 0xEE).unwrap();
            copy_with(PATHS[which], &dst, dst_offset, &src, src_offset, len).unwrap();
            copy_fence();
            let mut got = vec![0; REGION as usize];
            dst.read_at(0, &mut got).unwrap();
            let (d, s, n) = (dst_offset as usize, src_offset as usize, len as usize);
            prop_assert_eq!(&got[d..d + n], &bytes[s..s + n]);
            prop_assert!(got[..d].iter().chain(&got[d + n..]).all(|&byte| byte == 0xEE));
        }
    }

    #[test]
    fn overlapping_ranges_of_one_region_move_like_memmove() {
        let region = HostRegion::allocate(65_536, HugePages::Never).unwrap();
        let bytes: Vec<u8> = (0..65_536_u32).map(|i| (i % 251) as u8).collect();
        region.write_at(0, &bytes).unwrap();
        copy(&region, 100, &region, 0, 60_000).unwrap();
        let mut got = vec![0; 60_000];
        region.read_at(100, &mut got).unwrap();
        assert!(got == bytes[..60_000]);
    }

    #[test]
    fn ranges_outside_are_refused_and_nothing_moves() {
        let region = HostRegion::allocate(4096, HugePages::Never).unwrap();
        for (dst, src, len) in [
            (0, 1, 4096),
            (1, 0, 4096),
            (u64::MAX, 0, 2),
            (0, u64::MAX, 2),
            (0, 0, u64::MAX),
        ] {
            let error = copy(&region, dst, &region, src, len).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Region);
        }
    }
}
