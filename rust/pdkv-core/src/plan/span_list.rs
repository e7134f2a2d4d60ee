//! The plan for explicit lists of spans.
//!
//! Pairs that continue one another on both sides are one entry. Entries are cut into units of at
//! most [`UNIT_BYTES`], so that one huge span still keeps many threads busy.

use std::ops::{ControlFlow, Range};

use super::explain::Explanation;
use super::{CopyRun, Place, refuse};
use crate::Result;
use crate::marks::Marks;
use crate::span::{Span, find_overlap};

/// The largest unit.
const UNIT_BYTES: u64 = 256 << 10;

#[derive(Clone, Copy, Debug)]
struct Entry {
    run: CopyRun,
    first_unit: u64,
}

#[derive(Debug)]
pub(super) struct SpanList {
    entries: Vec<Entry>,
    units: u64,
    total_bytes: u64,
}

impl SpanList {
    pub(super) fn new(src: &[Span], src_region_bytes: &[u64], dst: &[Span], dst_region_bytes: &[u64]) -> Result<Self> {
        if src.len() != dst.len() {
            return Err(refuse(format!(
                "`{}` source spans can't fill `{}` destination spans",
                src.len(),
                dst.len()
            )));
        }
        let mut entries: Vec<Entry> = Vec::with_capacity(src.len());
        let mut total_bytes = 0_u64;
        for (index, (from, to)) in src.iter().zip(dst).enumerate() {
            if from.len != to.len {
                return Err(refuse(format!(
                    "span `{index}` has `{}` bytes at the source and `{}` at the destination",
                    from.len, to.len
                )));
            }
            from.check(src_region_bytes)
                .map_err(|error| error.with("source span", index))?;
            to.check(dst_region_bytes)
                .map_err(|error| error.with("destination span", index))?;
            if from.len == 0 {
                continue;
            }
            total_bytes = total_bytes
                .checked_add(from.len)
                .ok_or_else(|| refuse("the plan is beyond 64 bits"))?;
            let run = CopyRun {
                src: Place {
                    region: from.region,
                    offset: from.offset,
                },
                dst: Place {
                    region: to.region,
                    offset: to.offset,
                },
                len: from.len,
            };
            match entries.last_mut() {
                // Both spans are in their regions, so these sums don't overflow.
                Some(Entry { run: last, .. })
                    if last.src.plus(last.len) == run.src && last.dst.plus(last.len) == run.dst =>
                {
                    last.len += run.len;
                }
                _ => entries.push(Entry { run, first_unit: 0 }),
            }
        }
        refuse_overlap(&entries)?;
        let mut units = 0;
        for entry in &mut entries {
            entry.first_unit = units;
            units += entry.run.len.div_ceil(UNIT_BYTES);
        }
        Ok(Self {
            entries,
            units,
            total_bytes,
        })
    }

    pub(super) fn unit_count(&self) -> u64 {
        self.units
    }

    pub(super) fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    pub(super) fn run_count(&self) -> u64 {
        self.entries.len() as u64
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
    }

    #[inline]
    pub(super) fn walk(&self, units: Range<u64>, mut f: impl FnMut(CopyRun) -> ControlFlow<()>) -> ControlFlow<()> {
        let end = units.end.min(self.units);
        if units.start >= end {
            return ControlFlow::Continue(());
        }
        let from = self.entries.partition_point(|entry| entry.first_unit <= units.start) - 1;
        for Entry { run, first_unit } in &self.entries[from..] {
            if *first_unit >= end {
                break;
            }
            let skip = units.start.saturating_sub(*first_unit) * UNIT_BYTES;
            let stop = (end - first_unit).saturating_mul(UNIT_BYTES).min(run.len);
            f(CopyRun {
                src: run.src.plus(skip),
                dst: run.dst.plus(skip),
                len: stop - skip,
            })?;
        }
        ControlFlow::Continue(())
    }

    pub(super) fn explain(&self, memory_bytes: usize) -> Explanation {
        Explanation {
            kind: "spans",
            blocks: self.run_count(),
            segments: self.run_count(),
            lanes: 1,
            units: self.units,
            runs: self.run_count(),
            total_bytes: self.total_bytes,
            chunk_bytes: self.entries.iter().map(|entry| entry.run.len).min().unwrap_or(0),
            pieces: 1,
            blocks_merge: true,
            memory_bytes: memory_bytes as u64,
        }
    }
}

fn refuse_overlap(entries: &[Entry]) -> Result<()> {
    let target = |entry: &Entry| Span::new(entry.run.dst.region, entry.run.dst.offset, entry.run.len);
    let ascending = |pair: &[Entry]| {
        let (first, second) = (target(&pair[0]), target(&pair[1]));
        first.region < second.region || (first.region == second.region && first.end() <= Some(second.offset))
    };
    if entries.windows(2).all(ascending) {
        return Ok(());
    }
    let targets: Vec<_> = entries.iter().map(target).collect();
    if marked_once(&targets) {
        return Ok(());
    }
    match find_overlap(&targets) {
        None => Ok(()),
        Some((first, second)) => Err(refuse(format!(
            "destination spans of `{}` bytes at `{}` and `{}` bytes at `{}` of region `{}` overlap",
            first.len, first.offset, second.len, second.offset, first.region
        ))),
    }
}

/// Whether marks prove that nothing overlaps; false also where sorting is the cheaper proof.
fn marked_once(targets: &[Span]) -> bool {
    // All offsets and lengths are multiples of one power of two: a bit stands for that many bytes.
    let shift = targets
        .iter()
        .fold(0, |bits, span| bits | span.offset | span.len)
        .trailing_zeros();
    let granules = |bytes: u64| bytes >> shift;
    let regions = targets.iter().map(|span| span.region as usize + 1).max().unwrap_or(0);
    let mut ends = vec![0; regions];
    for span in targets {
        let end = &mut ends[span.region as usize];
        *end = granules(span.offset + span.len).max(*end);
    }
    let mut starts = Vec::with_capacity(regions);
    let mut total = 0_u64;
    for end in ends {
        starts.push(total);
        total = total.saturating_add(end);
    }
    if !Marks::are_cheap(total, targets.len()) {
        return false;
    }
    let mut marks = Marks::new(total);
    targets
        .iter()
        .all(|span| marks.mark(starts[span.region as usize] + granules(span.offset), granules(span.len)))
}
