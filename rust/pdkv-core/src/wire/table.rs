//! Block tables on the wire: runs, each start as signed distance from the end of the run before, so
//! that ordered tables cost two or three bytes a run.

use super::{MAX_FRAME, schema, violation};
use crate::block_table::{BlockRun, BlockTable};
use crate::error::Result;

impl From<&BlockTable> for schema::Table {
    fn from(table: &BlockTable) -> Self {
        let mut end = 0i64;
        let mut packed = Self::default();
        for run in table.runs() {
            packed.start_deltas.push(i64::from(run.start) - end);
            packed.lens.push(run.len);
            end = i64::from(run.start) + i64::from(run.len);
        }
        packed
    }
}

/// Whether a grant with this table fits one frame.
pub(crate) fn table_fits(table: &BlockTable) -> bool {
    use prost::Message as _;
    // Ten bytes a run are more than any run takes; only huge tables are measured.
    table.runs().len() < MAX_FRAME / 10 || schema::Table::from(table).encoded_len() + 64 <= MAX_FRAME
}

/// Reads a table that must hold exactly `num_blocks` blocks.
pub(super) fn decode(packed: &schema::Table, num_blocks: u32) -> Result<BlockTable> {
    if packed.start_deltas.len() != packed.lens.len() {
        return Err(violation(format!(
            "block table has `{}` starts but `{}` lengths",
            packed.start_deltas.len(),
            packed.lens.len()
        )));
    }
    let mut end = 0i64;
    let mut runs = Vec::with_capacity(packed.lens.len());
    for (&delta, &len) in packed.start_deltas.iter().zip(&packed.lens) {
        let start = end.checked_add(delta).and_then(|start| u32::try_from(start).ok());
        let Some(start) = start else {
            return Err(violation(format!(
                "block table run `{}` starts outside of 32 bits",
                runs.len()
            )));
        };
        if len == 0 {
            return Err(violation(format!("block table run `{}` is empty", runs.len())));
        }
        end = i64::from(start) + i64::from(len);
        runs.push(BlockRun { start, len });
    }
    let table = BlockTable::from_runs(&runs).map_err(|e| violation("block table is not valid").with_source(e))?;
    if table.len() as u64 != u64::from(num_blocks) {
        return Err(violation(format!(
            "block table holds `{}` blocks, the grant says `{num_blocks}`",
            table.len()
        )));
    }
    Ok(table)
}
