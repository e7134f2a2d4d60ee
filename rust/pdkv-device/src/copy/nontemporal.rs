//! Copies with non-temporal stores. The head up to the first aligned address and the tail go plainly.

use std::arch::x86_64::{
    __m256i, __m512i, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
};

/// Splits a run into a head that ends at an aligned destination, a body of whole lines, and a tail.
fn split(dst: *mut u8, len: usize, line: usize) -> (usize, usize) {
    let head = (dst.addr().wrapping_neg() & (line - 1)).min(len);
    (head, (len - head) & !(line - 1))
}

/// # Safety
/// `src` must be readable and `dst` writable for `len` bytes, the two must not overlap, and the
/// processor must have AVX2.
#[expect(
    clippy::cast_ptr_alignment,
    reason = "loads are unaligned, stores begin at an aligned head"
)]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn copy_avx2(dst: *mut u8, src: *const u8, len: usize) {
    const LINE: usize = 128;
    let (head, body) = split(dst, len, LINE);
    // SAFETY: `head <= len`, and the caller vouches for `len` bytes on both sides.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, head) };
    let mut at = head;
    while at < head + body {
        let from = src.wrapping_add(at).cast::<__m256i>();
        let to = dst.wrapping_add(at).cast::<__m256i>();
        // SAFETY: `at + 128 <= len`; the load needs no alignment.
        let a = unsafe { _mm256_loadu_si256(from) };
        // SAFETY: as above, bytes 32..64 of the line.
        let b = unsafe { _mm256_loadu_si256(from.wrapping_add(1)) };
        // SAFETY: as above, bytes 64..96 of the line.
        let c = unsafe { _mm256_loadu_si256(from.wrapping_add(2)) };
        // SAFETY: as above, bytes 96..128 of the line.
        let d = unsafe { _mm256_loadu_si256(from.wrapping_add(3)) };
        // SAFETY: `at + 128 <= len`, and `dst + head` is aligned to 128, so every line is.
        unsafe { _mm256_stream_si256(to, a) };
        // SAFETY: as above, bytes 32..64 of the line.
        unsafe { _mm256_stream_si256(to.wrapping_add(1), b) };
        // SAFETY: as above, bytes 64..96 of the line.
        unsafe { _mm256_stream_si256(to.wrapping_add(2), c) };
        // SAFETY: as above, bytes 96..128 of the line.
        unsafe { _mm256_stream_si256(to.wrapping_add(3), d) };
        at += LINE;
    }
    // SAFETY: `at <= len`, and the caller vouches for `len` bytes on both sides.
    unsafe { std::ptr::copy_nonoverlapping(src.wrapping_add(at), dst.wrapping_add(at), len - at) };
}

/// # Safety
/// `src` must be readable and `dst` writable for `len` bytes, the two must not overlap, and the
/// processor must have AVX-512F.
#[expect(
    clippy::cast_ptr_alignment,
    reason = "loads are unaligned, stores begin at an aligned head"
)]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn copy_avx512(dst: *mut u8, src: *const u8, len: usize) {
    const LINE: usize = 256;
    let (head, body) = split(dst, len, LINE);
    // SAFETY: `head <= len`, and the caller vouches for `len` bytes on both sides.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, head) };
    let mut at = head;
    while at < head + body {
        let from = src.wrapping_add(at).cast::<__m512i>();
        let to = dst.wrapping_add(at).cast::<__m512i>();
        // SAFETY: `at + 256 <= len`; the load needs no alignment.
        let a = unsafe { _mm512_loadu_si512(from) };
        // SAFETY: as above, bytes 64..128 of the line.
        let b = unsafe { _mm512_loadu_si512(from.wrapping_add(1)) };
        // SAFETY: as above, bytes 128..192 of the line.
        let c = unsafe { _mm512_loadu_si512(from.wrapping_add(2)) };
        // SAFETY: as above, bytes 192..256 of the line.
        let d = unsafe { _mm512_loadu_si512(from.wrapping_add(3)) };
        // SAFETY: `at + 256 <= len`, and `dst + head` is aligned to 256, so every line is.
        unsafe { _mm512_stream_si512(to, a) };
        // SAFETY: as above, bytes 64..128 of the line.
        unsafe { _mm512_stream_si512(to.wrapping_add(1), b) };
        // SAFETY: as above, bytes 128..192 of the line.
        unsafe { _mm512_stream_si512(to.wrapping_add(2), c) };
        // SAFETY: as above, bytes 192..256 of the line.
        unsafe { _mm512_stream_si512(to.wrapping_add(3), d) };
        at += LINE;
    }
    // SAFETY: `at <= len`, and the caller vouches for `len` bytes on both sides.
    unsafe { std::ptr::copy_nonoverlapping(src.wrapping_add(at), dst.wrapping_add(at), len - at) };
}
