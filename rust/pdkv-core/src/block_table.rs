//! Block tables: which physical blocks hold a sequence, in logical order, run-length coded.
//!
//! Real tables are often long runs of consecutive ids, so a run is the unit everywhere. Nothing
//! here knows what a block contains.

use std::fmt;

use crate::marks::Marks;
use crate::{Error, ErrorKind, Result};

/// Consecutive physical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockRun {
    /// First physical block id.
    pub start: u32,
    /// Number of blocks, at least 1.
    pub len: u32,
}

impl BlockRun {
    /// One past the last id; 64-bit because the last id may be `u32::MAX`.
    pub fn end(self) -> u64 {
        u64::from(self.start) + u64::from(self.len)
    }
}

/// An ordered list of physical block ids. Neighbouring consecutive ids are one run.
///
/// ```
/// use pdkv_core::block_table::BlockTable;
/// let table = BlockTable::from_ids(&[7, 8, 9, 3]);
/// assert_eq!(table.runs().len(), 2);
/// assert_eq!(table.get(2), Some(9));
/// ```
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct BlockTable {
    runs: Vec<BlockRun>,
    len: u64,
}

impl BlockTable {
    /// Builds a table from ids in logical order.
    pub fn from_ids(ids: &[u32]) -> Self {
        Self::build(ids.iter().copied())
    }

    /// One pass to count the runs, one to write them: no other memory is touched than the table's.
    fn build(ids: impl ExactSizeIterator<Item = u32> + Clone) -> Self {
        let len = ids.len() as u64;
        let mut rest = ids.clone();
        let Some(first) = rest.next() else {
            return Self::default();
        };
        // Counting first is vectorised and spares growing, which costs more than the rest.
        let pairs = ids.zip(rest.clone());
        let breaks = pairs.filter(|&(id, next)| id.wrapping_add(1) != next).count();
        let mut runs = Vec::with_capacity(breaks + 1);
        let mut run = BlockRun { start: first, len: 1 };
        for id in rest {
            if run.end() == u64::from(id) && run.len < u32::MAX {
                run.len += 1;
            } else {
                runs.push(run);
                run = BlockRun { start: id, len: 1 };
            }
        }
        runs.push(run);
        Self { runs, len }
    }

    /// Builds a table from signed ids, as numpy and torch index arrays carry them.
    ///
    /// # Errors
    /// `Layout` naming the index and value of the first id that is negative or too large.
    pub fn from_ids_i64(ids: &[i64]) -> Result<Self> {
        Self::from_signed(ids)
    }

    /// Builds a table from signed 32-bit ids.
    ///
    /// # Errors
    /// `Layout` naming the index and value of the first negative id.
    pub fn from_ids_i32(ids: &[i32]) -> Result<Self> {
        Self::from_signed(ids)
    }

    fn from_signed<T: Copy + Into<i64>>(ids: &[T]) -> Result<Self> {
        Self::from_values(ids.iter().map(|&id| id.into()))
    }

    /// Builds a table from integers wherever they lie, without copying them first.
    ///
    /// # Errors
    /// `Layout` naming the index and value of the first id that is negative or too large.
    fn from_values(ids: impl ExactSizeIterator<Item = i64> + Clone) -> Result<Self> {
        // All ids are in range exactly when the bits of all of them together are.
        let all = ids.clone().fold(0_i64, |bits, id| bits | id);
        if u32::try_from(all).is_ok() {
            return Ok(Self::build(ids.map(|id| id.cast_unsigned() as u32)));
        }
        let mut wide = ids.enumerate();
        let (index, id) = wide.find(|&(_, id)| u32::try_from(id).is_err()).unwrap_or_default();
        Err(Error::new(
            ErrorKind::Layout,
            "block_table",
            format!("block id `{id}` at index `{index}` is not in 0..={}", u32::MAX),
        ))
    }

    /// Builds a table from runs, as they come off the wire; neighbours are merged.
    ///
    /// # Errors
    /// `Layout` when a run is empty or leaves the range of block ids.
    pub fn from_runs(runs: &[BlockRun]) -> Result<Self> {
        let mut table = Self {
            runs: Vec::with_capacity(runs.len()),
            len: 0,
        };
        for (index, &run) in runs.iter().enumerate() {
            if run.len == 0 || run.end() > u64::from(u32::MAX) + 1 {
                return Err(Error::new(
                    ErrorKind::Layout,
                    "block_table",
                    format!(
                        "run `{index}` of `{}` blocks from `{}` is empty or too long",
                        run.len, run.start
                    ),
                ));
            }
            table.append(run);
        }
        Ok(table)
    }

    /// Appends a run, merging it with the last one where they meet.
    fn append(&mut self, run: BlockRun) {
        match self.runs.last_mut() {
            Some(last) if last.end() == u64::from(run.start) && last.len.checked_add(run.len).is_some() => {
                last.len += run.len;
            }
            _ => self.runs.push(run),
        }
        self.len += u64::from(run.len);
    }

    /// The runs, in logical order.
    pub fn runs(&self) -> &[BlockRun] {
        &self.runs
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The physical ids, in logical order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs
            .iter()
            .flat_map(|run| (0..run.len).map(move |step| run.start + step))
    }

    /// The runs with the logical position of the first block of each.
    fn placed(&self) -> impl Iterator<Item = (u64, BlockRun)> + '_ {
        self.runs.iter().scan(0, |next, &run| {
            let position = *next;
            *next += u64::from(run.len);
            Some((position, run))
        })
    }

    /// The physical id at a logical position. Looks at every run before it; to visit many, use
    /// [`BlockTable::iter`].
    pub fn get(&self, position: usize) -> Option<u32> {
        let position = position as u64;
        self.placed()
            .find(|(start, run)| position - start < u64::from(run.len))
            .map(|(start, run)| run.start + (position - start) as u32)
    }

    /// The table of `count` blocks from logical position `first`.
    ///
    /// # Errors
    /// `Layout` when the range leaves the table.
    pub fn slice(&self, first: usize, count: usize) -> Result<Self> {
        let (first, count) = (first as u64, count as u64);
        let end = first.checked_add(count).filter(|&end| end <= self.len).ok_or_else(|| {
            Error::new(
                ErrorKind::Layout,
                "block_table",
                format!(
                    "`{count}` blocks from position `{first}` leave a table of `{}` blocks",
                    self.len
                ),
            )
        })?;
        let mut table = Self::default();
        for (start, run) in self.placed() {
            let (from, stop) = (first.max(start), end.min(start + u64::from(run.len)));
            if from < stop {
                table.append(BlockRun {
                    start: run.start + (from - start) as u32,
                    len: (stop - from) as u32,
                });
            } else if start >= end {
                break;
            }
        }
        Ok(table)
    }

    /// Checks that every id is below `num_blocks`.
    ///
    /// # Errors
    /// `Layout` naming the first id out of range, its position and the bound.
    pub fn validate(&self, num_blocks: u32) -> Result<()> {
        let bound = u64::from(num_blocks);
        if self.runs.iter().fold(0, |most, run| run.end().max(most)) <= bound {
            return Ok(());
        }
        for (position, run) in self.placed() {
            if run.end() > bound {
                let id = num_blocks.max(run.start);
                let position = position + u64::from(id - run.start);
                return Err(Error::new(
                    ErrorKind::Layout,
                    "block_table",
                    format!(
                        "block `{id}` at position `{position}` is not below the `{num_blocks}` blocks of the cache"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Checks that every id is below `num_blocks` and that none comes twice.
    ///
    /// # Errors
    /// `Layout` naming the id that is out of range, or the smallest id found twice.
    pub fn check_unique(&self, num_blocks: u32) -> Result<()> {
        self.validate(num_blocks)?;
        if self.len > u64::from(num_blocks) || !self.is_unique(num_blocks) {
            return Err(self.duplicate_error());
        }
        Ok(())
    }

    /// Whether no id comes twice; all ids are below `num_blocks`.
    fn is_unique(&self, num_blocks: u32) -> bool {
        if self
            .runs
            .windows(2)
            .all(|pair| pair[0].end() <= u64::from(pair[1].start))
        {
            return true;
        }
        // The cache may be huge and the table small.
        if Marks::are_cheap(u64::from(num_blocks), self.runs.len()) {
            let mut marks = Marks::new(u64::from(num_blocks));
            return self
                .runs
                .iter()
                .all(|run| marks.mark(u64::from(run.start), u64::from(run.len)));
        }
        sorted(&self.runs)
            .windows(2)
            .all(|pair| pair[0].end() <= u64::from(pair[1].start))
    }

    #[cold]
    fn duplicate_error(&self) -> Error {
        let twice = sorted(&self.runs)
            .windows(2)
            .find(|pair| pair[0].end() > u64::from(pair[1].start))
            .map_or(0, |pair| pair[1].start);
        let places: Vec<_> = self
            .placed()
            .filter(|(_, run)| run.start <= twice && u64::from(twice) < run.end())
            .map(|(position, run)| position + u64::from(twice - run.start))
            .take(2)
            .collect();
        Error::new(
            ErrorKind::Layout,
            "block_table",
            format!("block `{twice}` comes more than once, at positions `{places:?}`"),
        )
        .with_hint("a destination block can be written only once in a transfer")
    }
}

fn sorted(runs: &[BlockRun]) -> Vec<BlockRun> {
    let mut runs = runs.to_vec();
    runs.sort_unstable_by_key(|run| run.start);
    runs
}

impl fmt::Debug for BlockTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockTable({} blocks in {} runs)", self.len, self.runs.len())
    }
}

#[cfg(test)]
#[path = "block_table_tests.rs"]
mod tests;
