//! Block tables on the wire: the starts of the runs and their lengths, each as one string of
//! little-endian 32-bit words. Without lengths every run is one block, as in a scattered table. Words
//! and not varints, because a large table is copied here and there while the consumer waits for it.

use super::{MAX_FRAME, schema, violation};
use crate::block_table::{BlockRun, BlockTable};
use crate::error::Result;

const WORD: usize = 4;
/// What a grant holds besides its table, generously.
const REST: usize = 256;

impl From<&BlockTable> for schema::Table {
    fn from(table: &BlockTable) -> Self {
        let runs = table.runs();
        let words = |word: fn(&BlockRun) -> u32| {
            let mut bytes = Vec::with_capacity(runs.len() * WORD);
            bytes.extend(runs.iter().flat_map(|run| word(run).to_le_bytes()));
            bytes
        };
        let single = runs.len() == table.len();
        Self {
            starts: words(|run| run.start),
            lens: if single { Vec::new() } else { words(|run| run.len) },
        }
    }
}

/// Whether a grant with this table fits one frame.
pub(crate) fn table_fits(table: &BlockTable) -> bool {
    let words = if table.runs().len() == table.len() { 1 } else { 2 };
    table.runs().len().saturating_mul(words * WORD) <= MAX_FRAME - REST
}

/// Reads a table that must hold exactly `num_blocks` blocks.
pub(super) fn decode(packed: &schema::Table, num_blocks: u32) -> Result<BlockTable> {
    let (starts, lens) = (packed.starts.as_chunks::<WORD>(), packed.lens.as_chunks::<WORD>());
    let whole = starts.1.is_empty() && lens.1.is_empty();
    if !whole || !(lens.0.is_empty() || lens.0.len() == starts.0.len()) {
        return Err(violation(format!(
            "block table has `{}` bytes of starts but `{}` of lengths",
            packed.starts.len(),
            packed.lens.len()
        )));
    }
    let word = |bytes: &[u8; WORD]| u32::from_le_bytes(*bytes);
    let lens = lens.0.iter().map(word).chain(std::iter::repeat(1));
    let runs: Vec<_> = starts
        .0
        .iter()
        .zip(lens)
        .map(|(start, len)| BlockRun {
            start: word(start),
            len,
        })
        .collect();
    let table = BlockTable::from_runs(&runs).map_err(|e| violation("block table is not valid").with_source(e))?;
    if table.len() as u64 != u64::from(num_blocks) {
        return Err(violation(format!(
            "block table holds `{}` blocks, the grant says `{num_blocks}`",
            table.len()
        )));
    }
    Ok(table)
}
