//! Bytes that say where they come from, so that a wrong one names its page: written and compared fast.
//!
//! Word `w` (64 bits, little endian) of a page is `key ^ (w * GOLDEN)`. Keys are the caller's: the
//! benchmark's Python twin mixes them from (seed, stamp, layer, block) and traces wrong pages back.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use pdkv_core::{Error, ErrorKind, Result};

use crate::region::HostRegion;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
/// Words made at a time: small enough to stay in the first-level cache.
const CHUNK_WORDS: usize = 1024;
/// Pages a thread takes at a time.
const BATCH: usize = 64;

/// Writes the page of each key at its offset.
///
/// # Errors
/// `Region` when a page does not lie inside.
pub fn fill(region: &HostRegion, pages: &Pages<'_>, threads: usize) -> Result<()> {
    pages.share_out(threads, |position, bytes| {
        let (offset, key) = (pages.offsets[position], pages.keys[position]);
        pages.chunks(key, bytes, |at, chunk| {
            region.write_at(offset + at, chunk).map(|()| true)
        })?;
        Ok(())
    })
}

/// The positions of the pages that differ from the page of their key, ascending.
///
/// # Errors
/// `Region` when a page does not lie inside.
pub fn verify(region: &HostRegion, pages: &Pages<'_>, threads: usize) -> Result<Vec<usize>> {
    let wrong = Mutex::new(Vec::new());
    pages.share_out(threads, |position, bytes| {
        let (offset, key) = (pages.offsets[position], pages.keys[position]);
        let mut found = [0_u8; CHUNK_WORDS * 8];
        let same = pages.chunks(key, bytes, |at, chunk| {
            let found = &mut found[..chunk.len()];
            region.read_at(offset + at, found)?;
            Ok(found == chunk)
        })?;
        if !same {
            wrong.lock().unwrap_or_else(PoisonError::into_inner).push(position);
        }
        Ok(())
    })?;
    let mut wrong = wrong.into_inner().unwrap_or_else(PoisonError::into_inner);
    wrong.sort_unstable();
    Ok(wrong)
}

/// Pages of equal size in one region.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    offsets: &'a [u64],
    keys: &'a [u64],
    page_bytes: u64,
}

impl<'a> Pages<'a> {
    /// Pages at these offsets, one key for each.
    ///
    /// # Errors
    /// `Config` for lists of unequal length or empty pages.
    pub fn new(offsets: &'a [u64], keys: &'a [u64], page_bytes: u64) -> Result<Self> {
        if offsets.len() != keys.len() || page_bytes == 0 {
            let what = format!(
                "`{}` offsets, `{}` keys, pages of `{page_bytes}` bytes",
                offsets.len(),
                keys.len()
            );
            return Err(Error::new(ErrorKind::Config, "pattern", what));
        }
        Ok(Self {
            offsets,
            keys,
            page_bytes,
        })
    }

    /// Calls `page` with every position, from `threads` threads, each with a buffer of its own.
    fn share_out(&self, threads: usize, page: impl Fn(usize, &mut [u8]) -> Result<()> + Sync) -> Result<()> {
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || -> Result<()> {
            let mut bytes = [0_u8; CHUNK_WORDS * 8];
            while !failed.load(Ordering::Relaxed) {
                let first = next.fetch_add(BATCH, Ordering::Relaxed);
                for position in first..(first + BATCH).min(self.offsets.len()) {
                    page(position, &mut bytes).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
                }
                if first + BATCH >= self.offsets.len() {
                    break;
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let hands: Vec<_> = (1..threads.clamp(1, 64)).map(|_| scope.spawn(work)).collect();
            let own = work();
            hands
                .into_iter()
                .map(|hand| hand.join().expect("no panic in work"))
                .fold(own, Result::and)
        })
    }

    /// Makes the page of `key` a chunk at a time; stops early where `each` says false.
    fn chunks(&self, key: u64, bytes: &mut [u8], mut each: impl FnMut(u64, &[u8]) -> Result<bool>) -> Result<bool> {
        let mut at = 0;
        while at < self.page_bytes {
            let len = (self.page_bytes - at).min(bytes.len() as u64) as usize;
            let first = at / 8;
            for (word, place) in (first..).zip(bytes[..len.next_multiple_of(8)].chunks_exact_mut(8)) {
                place.copy_from_slice(&(key ^ word.wrapping_mul(GOLDEN)).to_le_bytes());
            }
            if !each(at, &bytes[..len])? {
                return Ok(false);
            }
            at += len as u64;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HugePages;

    #[test]
    fn exactly_the_pages_with_a_wrong_byte_are_found() {
        let region = HostRegion::allocate(64 << 10, HugePages::Never).unwrap();
        let offsets: Vec<u64> = (0..60).map(|page| page * 17 % 60 * 1001 + 3).collect();
        let keys: Vec<u64> = (0..60).map(|key| key * 0x1234_5678_9ABC).collect();
        for page_bytes in [1, 8, 1000] {
            let pages = Pages::new(&offsets, &keys, page_bytes).unwrap();
            fill(&region, &pages, 3).unwrap();
            assert!(verify(&region, &pages, 3).unwrap().is_empty());
            for (page, byte) in [(5, 0), (33, page_bytes - 1)] {
                let mut found = [0];
                region.read_at(offsets[page] + byte, &mut found).unwrap();
                region.write_at(offsets[page] + byte, &[found[0] ^ 0x10]).unwrap();
            }
            assert_eq!(verify(&region, &pages, 2).unwrap(), [5, 33], "{page_bytes}");
        }
    }

    #[test]
    fn bad_lists_are_refused() {
        let region = HostRegion::allocate(4096, HugePages::Never).unwrap();
        assert_eq!(Pages::new(&[0], &[], 8).unwrap_err().kind(), ErrorKind::Config);
        assert_eq!(Pages::new(&[0], &[1], 0).unwrap_err().kind(), ErrorKind::Config);
        let outside = Pages::new(&[4090], &[1], 8).unwrap();
        assert_eq!(fill(&region, &outside, 1).unwrap_err().kind(), ErrorKind::Region);
        assert_eq!(verify(&region, &outside, 4).unwrap_err().kind(), ErrorKind::Region);
    }
}
