//! What the checksums of a verified copy say: whether what lies at the destination is what was read at the source.

use std::fmt::Write as _;

use pdkv_core::plan::Plan;
use pdkv_core::{Error, ErrorKind, Result};

const VERIFY: &str = "verify a copy";
/// Blocks that a message names.
const NAMED: usize = 8;

/// Whether every page of a plan lies as it was read. `sums` are those of what was read and, behind them, of what was placed.
///
/// # Errors
/// `Integrity` naming what differs: blocks of the destination, or the pieces of a plan of spans, which have one sum together.
pub(super) fn pages(plan: &Plan, sums: Option<Vec<u64>>) -> Result<()> {
    let wrong = differing(sums)?;
    if wrong.is_empty() {
        return Ok(());
    }
    let Some(geometry) = plan.geometry() else {
        let message = format!(
            "`{}` bytes in `{}` pieces, not all of which lie at the destination as they were read",
            plan.total_bytes(),
            plan.run_count()
        );
        return Err(refuse(message));
    };
    let blocks = geometry
        .blocks()
        .flat_map(|run| (run.src..).zip(run.dst..).take(run.len as usize));
    let mut message = format!(
        "`{}` of `{}` blocks do not lie at the destination as they were read:",
        wrong.len(),
        geometry.positions()
    );
    let mut wrong = wrong.into_iter().peekable();
    let found = (0..)
        .zip(blocks)
        .filter(|(position, _)| wrong.next_if_eq(position).is_some());
    for (number, (_, (src, dst))) in found.enumerate() {
        let _ = match number {
            0..NAMED => write!(message, "{} `{dst}` from `{src}`", if number == 0 { "" } else { "," }),
            NAMED => write!(message, ", and more"),
            _ => Ok(()),
        };
    }
    Err(refuse(message))
}

/// The same for bytes that have one sum together.
///
/// # Errors
/// `Integrity` naming the bytes as `what`.
pub(super) fn whole(what: impl FnOnce() -> String, sums: Option<Vec<u64>>) -> Result<()> {
    if differing(sums)?.is_empty() {
        return Ok(());
    }
    Err(refuse(format!(
        "{} do not lie at the destination as they were read",
        what()
    )))
}

/// The positions whose sums differ, in ascending order.
fn differing(sums: Option<Vec<u64>>) -> Result<Vec<usize>> {
    // Never taken for success.
    let sums = sums.ok_or_else(|| Error::new(ErrorKind::Internal, VERIFY, "a verified copy has no checksums"))?;
    let (read, placed) = sums.split_at(sums.len() / 2);
    let wrong = |(position, (read, placed))| (read != placed).then_some(position);
    Ok(read.iter().zip(placed).enumerate().filter_map(wrong).collect())
}

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::Integrity, VERIFY, message)
        .with_hint("the driver, a link or a GPU has changed bytes, or somebody else wrote to the destination meanwhile")
}
