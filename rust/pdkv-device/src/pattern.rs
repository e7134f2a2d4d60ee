//! Bytes that say where they belong, so that a wrong one names where it came from.
//!
//! Every 8-byte word of a block is a one-to-one function of (request, layer, block, word in the block):
//! packed into 64 bits, multiplied by an odd constant so that neighbours differ in every byte, and
//! shifted so that memory of zeros is no likely origin. Ten bits of the request, ten of the layer, 24 of
//! the block and 20 of the word (8 MiB) count; higher ones are cut off.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use pdkv_core::{Error, ErrorKind, Result};

use crate::region::HostRegion;

const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;
const SHIFT: u64 = 0x5D4B_17C3_A1E9_6F2B;
const UNSPREAD: u64 = inverse(SPREAD);
/// Words compared between two looks at whether any differed.
const CHUNK_WORDS: usize = 128;
/// Pieces a thread takes at a time.
const CLAIM: usize = 64;

/// Newton's iteration for the inverse of an odd number modulo 2^64.
const fn inverse(odd: u64) -> u64 {
    let mut guess = odd;
    let mut round = 0;
    while round < 6 {
        guess = guess.wrapping_mul(2_u64.wrapping_sub(odd.wrapping_mul(guess)));
        round += 1;
    }
    guess
}

/// Where a word belongs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The request, modulo 1,024.
    pub request: u32,
    /// The layer, modulo 1,024.
    pub layer: u32,
    /// The block, modulo 2^24.
    pub block: u32,
    /// The byte in the block, a multiple of 8, modulo 8 MiB.
    pub offset: u64,
}

impl Origin {
    /// The word that belongs here.
    pub fn word(self) -> u64 {
        let packed = (u64::from(self.request) & 0x3FF) << 54
            | (u64::from(self.layer) & 0x3FF) << 44
            | (u64::from(self.block) & 0xFF_FFFF) << 20
            | ((self.offset / 8) & 0xF_FFFF);
        packed.wrapping_mul(SPREAD).wrapping_add(SHIFT)
    }

    /// Where a word belongs; any word belongs somewhere.
    pub fn of(word: u64) -> Self {
        let packed = word.wrapping_sub(SHIFT).wrapping_mul(UNSPREAD);
        Self {
            request: (packed >> 54) as u32,
            layer: (packed >> 44) as u32 & 0x3FF,
            block: (packed >> 20) as u32 & 0xFF_FFFF,
            offset: (packed & 0xF_FFFF) * 8,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            request,
            layer,
            block,
            offset,
        } = self;
        write!(f, "request {request} layer {layer} block {block} offset {offset}")
    }
}

/// One run of a block: `len` bytes of the region from `offset` on belong to `origin` and what follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where in the region.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
    /// Where the first byte belongs.
    pub origin: Origin,
}

/// The first wrong word of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// Where in the region it stands.
    pub offset: u64,
    /// Where the word that should stand there belongs.
    pub expected: Origin,
    /// What stands there.
    pub word: u64,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "offset {} should hold {} but holds ", self.offset, self.expected)?;
        match self.word {
            0 => f.write_str("zeros"),
            word => write!(f, "{} (word {word:#018x})", Origin::of(word)),
        }
    }
}

/// What a check found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Words compared; a shorter tail counts as one.
    pub words: u64,
    /// Words that differ.
    pub wrong: u64,
    /// The one with the lowest place in the list of pieces.
    pub first: Option<Wrong>,
}

/// Writes the pattern of `pieces` with up to `threads` threads.
///
/// # Errors
/// `Region` when a piece does not lie inside a writable region, `Config` when one does not begin at a
/// multiple of 8 of its block; nothing is written then.
pub fn fill(region: &HostRegion, pieces: &[Piece], threads: usize) -> Result<()> {
    for piece in pieces {
        check(piece)?;
        region.target("pattern_fill", piece.offset, piece.len)?;
    }
    over(pieces, threads, |_, piece| {
        // Checked above: lies inside.
        if let Ok(target) = region.target("pattern_fill", piece.offset, piece.len) {
            fill_run(target, piece.len as usize, piece.origin.word());
        }
    });
    Ok(())
}

/// Compares `pieces` with their pattern with up to `threads` threads.
///
/// # Errors
/// As [`fill`].
pub fn verify(region: &HostRegion, pieces: &[Piece], threads: usize) -> Result<Verdict> {
    for piece in pieces {
        check(piece)?;
        region.source("pattern_verify", piece.offset, piece.len)?;
    }
    let verdict = std::sync::Mutex::new((usize::MAX, Verdict::default()));
    over(pieces, threads, |index, piece| {
        let Ok(source) = region.source("pattern_verify", piece.offset, piece.len) else {
            return;
        };
        let (wrong, first) = verify_run(source, piece.len as usize, piece.origin.word());
        if wrong > 0
            && let Some((at, word)) = first
        {
            let mut verdict = verdict.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            verdict.1.wrong += wrong;
            if index < verdict.0 {
                verdict.0 = index;
                let expected = Origin::of(piece.origin.word().wrapping_add(SPREAD.wrapping_mul(at as u64)));
                verdict.1.first = Some(Wrong {
                    offset: piece.offset + at as u64 * 8,
                    expected,
                    word,
                });
            }
        }
    });
    let (_, mut verdict) = verdict.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    verdict.words = pieces.iter().map(|piece| piece.len.div_ceil(8)).sum();
    Ok(verdict)
}

fn check(piece: &Piece) -> Result<()> {
    if piece.origin.offset.is_multiple_of(8) {
        return Ok(());
    }
    let message = format!(
        "a run begins at byte `{}` of its block, not at a word",
        piece.origin.offset
    );
    Err(Error::new(ErrorKind::Config, "pattern", message))
}

/// Calls `work` for every piece, from several threads when there is enough to do.
fn over(pieces: &[Piece], threads: usize, work: impl Fn(usize, &Piece) + Sync) {
    let next = AtomicUsize::new(0);
    let run = || {
        loop {
            let start = next.fetch_add(CLAIM, Ordering::Relaxed);
            let Some(claimed) = pieces
                .get(start..(start + CLAIM).min(pieces.len()))
                .filter(|c| !c.is_empty())
            else {
                return;
            };
            for (index, piece) in claimed.iter().enumerate() {
                work(start + index, piece);
            }
        }
    };
    let most = std::thread::available_parallelism().map_or(1, NonZeroUsize::get) * 4;
    let helpers = threads.min(most).min(pieces.len().div_ceil(CLAIM)).saturating_sub(1);
    std::thread::scope(|scope| {
        for _ in 0..helpers {
            scope.spawn(run);
        }
        run();
    });
}

/// Writes `len` bytes of words that begin with `word`. Called with checked ranges only.
fn fill_run(target: *mut u8, len: usize, mut word: u64) {
    let words = target.cast::<[u8; 8]>();
    for index in 0..len / 8 {
        // SAFETY: `fill` checked `len` bytes at `target` against a live writable region.
        unsafe { words.wrapping_add(index).write(word.to_le_bytes()) };
        word = word.wrapping_add(SPREAD);
    }
    let tail = word.to_le_bytes();
    let rest = len % 8;
    // SAFETY: as above; the rest are the last bytes of the range and fewer than 8.
    unsafe { std::ptr::copy_nonoverlapping(tail.as_ptr(), target.wrapping_add(len - rest), rest) };
}

/// Counts the words that differ and finds the first: its index and what it is.
fn verify_run(source: *const u8, len: usize, start: u64) -> (u64, Option<(usize, u64)>) {
    let words = source.cast::<[u8; 8]>();
    // SAFETY: `verify` checked `len` bytes at `source` against a live region; `index < len / 8` below.
    let read = |index: usize| u64::from_le_bytes(unsafe { words.wrapping_add(index).read() });
    let expected = |index: usize| start.wrapping_add(SPREAD.wrapping_mul(index as u64));
    let (mut wrong, mut first) = (0, None);
    let whole = len / 8;
    let mut at = 0;
    while at < whole {
        let stop = (at + CHUNK_WORDS).min(whole);
        let (mut differ, mut word) = (0, expected(at));
        for index in at..stop {
            differ |= read(index) ^ word;
            word = word.wrapping_add(SPREAD);
        }
        if differ != 0 {
            for index in (at..stop).filter(|&index| read(index) != expected(index)) {
                wrong += 1;
                first = first.or(Some((index, read(index))));
            }
        }
        at = stop;
    }
    let rest = len % 8;
    let mut tail = [0_u8; 8];
    // SAFETY: the rest are the last bytes of the checked range and fewer than 8.
    unsafe { std::ptr::copy_nonoverlapping(source.wrapping_add(len - rest), tail.as_mut_ptr(), rest) };
    if tail[..rest] != expected(whole).to_le_bytes()[..rest] {
        wrong += 1;
        first = first.or(Some((whole, u64::from_le_bytes(tail))));
    }
    (wrong, first)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::HugePages;

    proptest! {
        #[test]
        fn a_word_names_its_origin(request in 0_u32..1024, layer in 0_u32..1024, block in 0_u32..1 << 24, word in 0_u64..1 << 20) {
            let origin = Origin { request, layer, block, offset: word * 8 };
            prop_assert_eq!(Origin::of(origin.word()), origin);
        }

        #[test]
        fn one_wrong_byte_is_found_and_placed(len in 1_u64..5000, at in 0_u64..5000, flip in 1_u8..=255, start in 0_u64..100) {
            let at = at % len;
            let region = HostRegion::allocate(8192, HugePages::Never).unwrap();
            let origin = Origin { request: 3, layer: 4, block: 5, offset: start * 8 };
            let piece = Piece { offset: 11, len, origin };
            fill(&region, &[piece], 1).unwrap();
            prop_assert_eq!(verify(&region, &[piece], 2).unwrap().wrong, 0);
            let mut byte = [0];
            region.read_at(11 + at, &mut byte).unwrap();
            region.write_at(11 + at, &[byte[0] ^ flip]).unwrap();
            let verdict = verify(&region, &[piece], 1).unwrap();
            prop_assert_eq!((verdict.wrong, verdict.words), (1, len.div_ceil(8)));
            let wrong = verdict.first.unwrap();
            prop_assert_eq!(wrong.offset, 11 + at / 8 * 8);
            prop_assert_eq!(wrong.expected, Origin { offset: start * 8 + at / 8 * 8, ..origin });
        }
    }

    #[test]
    fn a_swapped_block_names_the_other_one() {
        let region = HostRegion::allocate(1 << 20, HugePages::Never).unwrap();
        let piece = |block: u32| {
            let origin = Origin {
                request: 7,
                layer: 2,
                block,
                offset: 0,
            };
            Piece {
                offset: u64::from(block) * 4096,
                len: 4096,
                origin,
            }
        };
        let pieces: Vec<_> = (0..256).map(piece).collect();
        fill(&region, &pieces, 3).unwrap();
        assert_eq!(verify(&region, &pieces, 3).unwrap().wrong, 0);
        crate::copy(&region, 9 * 4096, &region, 200 * 4096, 4096).unwrap();
        region.fill(30 * 4096, 8, 0).unwrap();
        let verdict = verify(&region, &pieces, 3).unwrap();
        assert_eq!(verdict.wrong, 513);
        let text = verdict.first.unwrap().to_string();
        assert!(
            text.contains("should hold request 7 layer 2 block 9 offset 0"),
            "{text}"
        );
        assert!(text.contains("holds request 7 layer 2 block 200 offset 0"), "{text}");
    }

    #[test]
    fn pieces_outside_or_off_the_word_are_refused() {
        let region = HostRegion::allocate(4096, HugePages::Never).unwrap();
        let outside = Piece {
            offset: 1,
            len: 4096,
            origin: Origin::default(),
        };
        assert_eq!(fill(&region, &[outside], 1).unwrap_err().kind(), ErrorKind::Region);
        assert_eq!(verify(&region, &[outside], 1).unwrap_err().kind(), ErrorKind::Region);
        let crooked = Piece {
            offset: 0,
            len: 8,
            origin: Origin {
                offset: 4,
                ..Origin::default()
            },
        };
        assert_eq!(fill(&region, &[crooked], 1).unwrap_err().kind(), ErrorKind::Config);
    }
}
