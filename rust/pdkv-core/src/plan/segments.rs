//! Stretches of a block table, or of two side by side, in which ids are consecutive.

use super::refuse;
use crate::Result;
use crate::block_table::BlockTable;

/// Consecutive blocks on all `N` sides, from one logical position on.
#[derive(Clone, Copy, Debug)]
struct Segment<const N: usize> {
    position: u32,
    blocks: [u32; N],
}

/// Segments by ascending position, closed by a sentinel.
#[derive(Debug)]
pub(super) struct Segments<const N: usize> {
    list: Box<[Segment<N>]>,
}

impl Segments<1> {
    /// The runs of one table.
    pub(super) fn of(table: &BlockTable) -> Result<Self> {
        let positions = narrow_len(table)?;
        let mut list = Vec::with_capacity(table.runs().len() + 1);
        let mut position = 0;
        for run in table.runs() {
            list.push(Segment {
                position,
                blocks: [run.start],
            });
            position += run.len;
        }
        Ok(Self::closed(list, positions))
    }
}

impl Segments<2> {
    /// The stretches in which both tables, of equal length, are consecutive.
    pub(super) fn zip(src: &BlockTable, dst: &BlockTable) -> Result<Self> {
        if src.len() != dst.len() {
            return Err(refuse(format!(
                "`{}` source blocks can't fill `{}` destination blocks",
                src.len(),
                dst.len()
            )));
        }
        let positions = narrow_len(src)?;
        let most = (src.runs().len() + dst.runs().len()).min(src.len() + 1);
        let mut list = Vec::with_capacity(most);
        let (mut sources, mut targets) = (src.runs().iter().copied(), dst.runs().iter().copied());
        let (mut source, mut target) = (sources.next(), targets.next());
        let mut position = 0;
        while let (Some(from), Some(to)) = (&mut source, &mut target) {
            let len = from.len.min(to.len);
            list.push(Segment {
                position,
                blocks: [from.start, to.start],
            });
            position += len;
            // A start may pass the last id only when its run is used up and replaced.
            if from.len == len {
                source = sources.next();
            } else {
                from.start += len;
                from.len -= len;
            }
            if to.len == len {
                target = targets.next();
            } else {
                to.start += len;
                to.len -= len;
            }
        }
        Ok(Self::closed(list, positions))
    }
}

impl<const N: usize> Segments<N> {
    fn closed(mut list: Vec<Segment<N>>, positions: u32) -> Self {
        list.push(Segment {
            position: positions,
            blocks: [0; N],
        });
        Self {
            list: list.into_boxed_slice(),
        }
    }

    /// Number of block positions.
    pub(super) fn positions(&self) -> u32 {
        self.list[self.list.len() - 1].position
    }

    /// Number of segments.
    pub(super) fn count(&self) -> usize {
        self.list.len() - 1
    }

    /// Bytes on the heap.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.list)
    }

    /// The segments of `count` positions from `first` on, clipped: first blocks and length. The
    /// range must lie in the table.
    #[inline]
    pub(super) fn range(&self, first: u32, count: u32) -> impl Iterator<Item = ([u32; N], u32)> + '_ {
        let end = first + count;
        let from = match count {
            0 => self.count(),
            _ => self.list.partition_point(|segment| segment.position <= first) - 1,
        };
        self.list[from..]
            .windows(2)
            .take_while(move |pair| pair[0].position < end)
            .map(move |pair| {
                let start = pair[0].position.max(first);
                let skip = start - pair[0].position;
                (
                    pair[0].blocks.map(|block| block + skip),
                    pair[1].position.min(end) - start,
                )
            })
    }
}

fn narrow_len(table: &BlockTable) -> Result<u32> {
    u32::try_from(table.len()).map_err(|_| refuse(format!("`{}` blocks are too many for one plan", table.len())))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_are_the_ids(
            pairs in prop::collection::vec((0_u32..6, 0_u32..6), 0..40),
            first in 0_u32..40,
            count in 0_u32..40,
        ) {
            let (src, dst): (Vec<_>, Vec<_>) = pairs.iter().copied().unzip();
            let segments = Segments::zip(&BlockTable::from_ids(&src), &BlockTable::from_ids(&dst)).unwrap();
            prop_assert_eq!(segments.positions() as usize, pairs.len());
            let first = first.min(segments.positions());
            let count = count.min(segments.positions() - first);
            let mut found = Vec::new();
            for (blocks, len) in segments.range(first, count) {
                prop_assert!(len > 0);
                found.extend((0..len).map(|step| (blocks[0] + step, blocks[1] + step)));
            }
            prop_assert_eq!(&found[..], &pairs[first as usize..(first + count) as usize]);
            let breaks = pairs.windows(2).filter(|p| p[0].0 + 1 != p[1].0 || p[0].1 + 1 != p[1].1).count();
            prop_assert_eq!(segments.count(), if pairs.is_empty() { 0 } else { breaks + 1 });
        }
    }
}
