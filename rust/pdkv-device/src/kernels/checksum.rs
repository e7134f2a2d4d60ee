//! The checksum of a page, as `cuda/checksum.cuh` computes it.
//!
//! Each aligned 32-bit word of the page, little endian, times a weight of its logical place, summed modulo 2^64. The sum is
//! linear, so the order and the width in which a page is read do not matter; weights are odd, so one wrong word always shows. It
//! guards against mistakes and broken hardware, not against an adversary.

/// A sum that grows by pieces of a page in any order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checksum(u64);

impl Checksum {
    /// Adds bytes that lie at `logical` in their page. A page's pieces may come in any order and number, each byte once.
    pub fn add(&mut self, logical: u64, bytes: &[u8]) {
        for (place, &byte) in (logical..).zip(bytes) {
            let part = u64::from(byte) << (place % 4 * 8);
            self.0 = self.0.wrapping_add(part.wrapping_mul(weight(place)));
        }
    }

    /// The sum so far.
    pub fn value(self) -> u64 {
        self.0
    }
}

/// The weight of the word that holds the byte at `logical`.
fn weight(logical: u64) -> u64 {
    let mut mixed = (logical / 16).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^= mixed >> 31;
    (mixed ^ (logical / 4 % 4).wrapping_mul(0xD6E8_FEB8_6659_FD93)) | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u64 {
        let mut sum = Checksum::default();
        sum.add(0, bytes);
        sum.value()
    }

    #[test]
    fn pieces_in_any_order_are_the_whole() {
        let page: Vec<u8> = (0..200_u32).map(|at| (at * 37 % 251) as u8).collect();
        let mut pieces = Checksum::default();
        for (first, end) in [(130, 200), (0, 3), (3, 64), (64, 130)] {
            pieces.add(first as u64, &page[first..end]);
        }
        assert_eq!(pieces.value(), sum(&page));
    }

    #[test]
    fn every_flipped_bit_and_every_swap_of_words_shows() {
        let page: Vec<u8> = (0..64_u32).map(|at| (at * 101 % 256) as u8).collect();
        let whole = sum(&page);
        for bit in 0..page.len() * 8 {
            let mut wrong = page.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(sum(&wrong), whole, "bit {bit}");
        }
        for (first, second) in (0..16).flat_map(|first| (0..first).map(move |second| (first, second))) {
            let mut wrong = page.clone();
            for byte in 0..4 {
                wrong.swap(first * 4 + byte, second * 4 + byte);
            }
            assert_ne!(sum(&wrong), whole, "words {first} and {second}");
        }
    }

    #[test]
    fn the_value_is_fixed() {
        // Both ends of a transfer may be of different releases.
        assert_eq!(sum(&[0; 32]), 0);
        assert_eq!(sum(&[1]), weight(0));
        let page: Vec<u8> = (0..48).collect();
        assert_eq!(sum(&page), 0xEAF6_6947_FE00_A5B0);
    }
}
