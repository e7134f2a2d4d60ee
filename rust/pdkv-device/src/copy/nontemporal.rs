//! Copies with non-temporal stores. The head up to the first aligned address and the tail go plainly.
//!
//! Long runs go four pages abreast. The hardware prefetches within a page and begins anew at the next, so that one
//! page after the other leaves the memory waiting at each boundary: by `benches/copy.rs` a quarter of the rate.

use std::arch::x86_64::{
    __m256i, __m512i, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
};

const PAGE: usize = 4096;
const ABREAST: usize = 4;
/// What is moved at once: whole vectors, and a divisor of a page.
const LINE: usize = 128;

/// Splits a run into a head that ends at an aligned destination, a body of whole lines, and a tail.
fn split(dst: *mut u8, len: usize) -> (usize, usize) {
    let head = (dst.addr().wrapping_neg() & (LINE - 1)).min(len);
    (head, (len - head) & !(LINE - 1))
}

/// A copy that moves its body with `$line`, which needs `$feature`.
macro_rules! copy_by {
    ($name:ident, $line:ident, $feature:literal) => {
        /// # Safety
        /// `src` must be readable and `dst` writable for `len` bytes, the two must not overlap, and the
        /// processor must have the feature that the name says.
        #[target_feature(enable = $feature)]
        pub(super) unsafe fn $name(dst: *mut u8, src: *const u8, len: usize) {
            let (head, body) = split(dst, len);
            // SAFETY: `head <= len`, and the caller vouches for `len` bytes on both sides.
            unsafe { std::ptr::copy_nonoverlapping(src, dst, head) };
            let (mut at, end) = (head, head + body);
            while end - at >= ABREAST * PAGE {
                for line in (at..at + PAGE).step_by(LINE) {
                    for page in 0..ABREAST {
                        let place = line + page * PAGE;
                        // SAFETY: `place + LINE <= end <= len`, and `dst + head` is aligned to a line, so every line is.
                        unsafe { $line(dst.wrapping_add(place), src.wrapping_add(place)) };
                    }
                }
                at += ABREAST * PAGE;
            }
            while at < end {
                // SAFETY: `at + LINE <= end <= len`; aligned as above.
                unsafe { $line(dst.wrapping_add(at), src.wrapping_add(at)) };
                at += LINE;
            }
            // SAFETY: `at <= len`, and the caller vouches for `len` bytes on both sides.
            unsafe { std::ptr::copy_nonoverlapping(src.wrapping_add(at), dst.wrapping_add(at), len - at) };
        }
    };
}

copy_by!(copy_avx2, line_avx2, "avx2");
copy_by!(copy_avx512, line_avx512, "avx512f");

/// # Safety
/// `src` must be readable and `dst` writable for [`LINE`] bytes, `dst` aligned to them, and the processor must have AVX2.
#[expect(
    clippy::cast_ptr_alignment,
    reason = "loads are unaligned, and the caller vouches for the alignment of the stores"
)]
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn line_avx2(dst: *mut u8, src: *const u8) {
    let (from, to) = (src.cast::<__m256i>(), dst.cast::<__m256i>());
    // SAFETY: bytes 0..32 of a readable line; the load needs no alignment.
    let a = unsafe { _mm256_loadu_si256(from) };
    // SAFETY: as above, bytes 32..64.
    let b = unsafe { _mm256_loadu_si256(from.wrapping_add(1)) };
    // SAFETY: as above, bytes 64..96.
    let c = unsafe { _mm256_loadu_si256(from.wrapping_add(2)) };
    // SAFETY: as above, bytes 96..128.
    let d = unsafe { _mm256_loadu_si256(from.wrapping_add(3)) };
    // SAFETY: bytes 0..32 of a writable, aligned line.
    unsafe { _mm256_stream_si256(to, a) };
    // SAFETY: as above, bytes 32..64.
    unsafe { _mm256_stream_si256(to.wrapping_add(1), b) };
    // SAFETY: as above, bytes 64..96.
    unsafe { _mm256_stream_si256(to.wrapping_add(2), c) };
    // SAFETY: as above, bytes 96..128.
    unsafe { _mm256_stream_si256(to.wrapping_add(3), d) };
}

/// # Safety
/// As [`line_avx2`], with AVX-512F.
#[expect(
    clippy::cast_ptr_alignment,
    reason = "loads are unaligned, and the caller vouches for the alignment of the stores"
)]
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn line_avx512(dst: *mut u8, src: *const u8) {
    let (from, to) = (src.cast::<__m512i>(), dst.cast::<__m512i>());
    // SAFETY: bytes 0..64 of a readable line; the load needs no alignment.
    let a = unsafe { _mm512_loadu_si512(from) };
    // SAFETY: as above, bytes 64..128.
    let b = unsafe { _mm512_loadu_si512(from.wrapping_add(1)) };
    // SAFETY: bytes 0..64 of a writable, aligned line.
    unsafe { _mm512_stream_si512(to, a) };
    // SAFETY: as above, bytes 64..128.
    unsafe { _mm512_stream_si512(to.wrapping_add(1), b) };
}
