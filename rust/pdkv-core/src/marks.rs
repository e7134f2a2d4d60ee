//! A bit per thing, to see in linear time whether anything comes twice.

/// Bits, none marked at first.
pub(crate) struct Marks(Vec<u64>);

impl Marks {
    /// `len` unmarked bits.
    pub(crate) fn new(len: u64) -> Self {
        Self(vec![0; len.div_ceil(64) as usize])
    }

    /// Whether `len` bits cost less than sorting `things`.
    pub(crate) fn are_cheap(len: u64, things: usize) -> bool {
        len / 64 <= 16 * things as u64 + 1024
    }

    /// Marks `count` bits from `first`; false when one of them was marked before.
    #[inline]
    pub(crate) fn mark(&mut self, first: u64, count: u64) -> bool {
        if count == 1 {
            // Scattered tables are made of these.
            let (word, mask) = (&mut self.0[(first / 64) as usize], 1 << (first % 64));
            let fresh = *word & mask == 0;
            *word |= mask;
            return fresh;
        }
        let (mut at, end) = (first, first + count);
        while at < end {
            let bit = at % 64;
            let here = (64 - bit).min(end - at);
            let mask = (u64::MAX >> (64 - here)) << bit;
            let word = &mut self.0[(at / 64) as usize];
            if *word & mask != 0 {
                return false;
            }
            *word |= mask;
            at += here;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_mark_is_seen_wherever_it_is() {
        for second in 0..320 {
            let mut marks = Marks::new(320);
            assert!(marks.mark(60, 200));
            assert_eq!(marks.mark(second, 1), !(60..260).contains(&second), "{second}");
        }
        assert!(Marks::new(0).mark(0, 0));
    }
}
