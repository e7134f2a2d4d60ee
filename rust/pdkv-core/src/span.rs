//! Byte ranges in regions.
//!
//! A region is an index into a list that the caller holds; this module knows no address.

use crate::{Error, ErrorKind, Result};

/// `len` bytes from `offset` in the region with index `region`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Span {
    /// Index of the region.
    pub region: u32,
    /// First byte in the region.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Span {
    /// A span.
    pub const fn new(region: u32, offset: u64, len: u64) -> Self {
        Self { region, offset, len }
    }

    /// One past the last byte; `None` past 2^64.
    pub const fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }

    /// Checks the span against the lengths of all regions.
    ///
    /// # Errors
    /// `Region` when there is no such region or the span leaves it.
    pub fn check(&self, region_bytes: &[u64]) -> Result<()> {
        let Some(&bound) = region_bytes.get(self.region as usize) else {
            return Err(Error::new(
                ErrorKind::Region,
                "span",
                format!(
                    "region `{}` is not one of `{}` regions",
                    self.region,
                    region_bytes.len()
                ),
            ));
        };
        if self.end().is_none_or(|end| end > bound) {
            return Err(Error::new(
                ErrorKind::Region,
                "span",
                format!(
                    "`{}` bytes from offset `{}` leave region `{}` of `{bound}` bytes",
                    self.len, self.offset, self.region
                ),
            ));
        }
        Ok(())
    }

    /// Whether `next` starts where this span ends, in the same region.
    pub fn meets(&self, next: &Self) -> bool {
        self.region == next.region && self.end() == Some(next.offset)
    }
}

/// Merges neighbours that meet, keeping the order; empty spans vanish.
pub fn coalesce(spans: &[Span]) -> Vec<Span> {
    let mut merged: Vec<Span> = Vec::new();
    for span in spans.iter().filter(|span| span.len > 0) {
        match merged.last_mut() {
            Some(last) if last.meets(span) && last.len.checked_add(span.len).is_some() => last.len += span.len,
            _ => merged.push(*span),
        }
    }
    merged
}

/// Two spans of the list that share a byte, if there are any. Every span must have an end.
pub fn find_overlap(spans: &[Span]) -> Option<(Span, Span)> {
    let mut sorted: Vec<Span> = spans.iter().copied().filter(|span| span.len > 0).collect();
    if !sorted.is_sorted() {
        sorted.sort_unstable();
    }
    sorted
        .windows(2)
        .find(|pair| pair[0].region == pair[1].region && pair[0].end().is_none_or(|end| end > pair[1].offset))
        .map(|pair| (pair[0], pair[1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_checked() {
        let span = Span::new(0, u64::MAX, 1);
        assert_eq!(span.end(), None);
        assert_eq!(span.check(&[u64::MAX]).unwrap_err().kind(), ErrorKind::Region);
        assert!(Span::new(1, 0, 1).check(&[8]).is_err());
        assert!(Span::new(0, 4, 5).check(&[8]).is_err());
        assert!(Span::new(0, 1 << 40, 4).check(&[(1 << 40) + 4]).is_ok());
    }

    #[test]
    fn neighbours_merge_in_order_only() {
        let spans = [
            Span::new(0, 0, 4),
            Span::new(0, 4, 4),
            Span::new(0, 9, 0),
            Span::new(0, 8, 1),
            Span::new(1, 9, 1),
            Span::new(0, 9, 1),
        ];
        assert_eq!(
            coalesce(&spans),
            [Span::new(0, 0, 9), Span::new(1, 9, 1), Span::new(0, 9, 1)]
        );
    }

    #[test]
    fn overlap_is_found_in_any_order() {
        let (a, b, c) = (Span::new(0, 8, 8), Span::new(0, 0, 8), Span::new(0, 15, 1));
        assert_eq!(find_overlap(&[a, b]), None);
        assert_eq!(find_overlap(&[b, c, a]), Some((a, c)));
        assert_eq!(find_overlap(&[a, Span::new(1, 8, 8)]), None);
    }
}
