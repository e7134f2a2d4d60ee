//! Spans of any lengths as jobs: one for each width of vectors, so a launch or a few, however many spans there are.
//!
//! What two addresses have in common decides how wide a span can be copied: its middle goes with others of that width, the bytes
//! before and after it, fewer than a vector, go with the single bytes. A job numbers the same count of tiles for every lane, so long
//! spans are cut to about the mean length and the end of a shorter one is left out by the kernel.

use std::ops::ControlFlow;

use pdkv_core::plan::{CopyRun, Plan};
use pdkv_core::{Error, ErrorKind, Result};

use super::entry::Entry;
use super::job::{Axis, Shape, Side};
use super::jobs::{Bases, Jobs, address};
use super::view::Lane;

/// Spans are cut to no less where a warp copies a tile: one of the largest.
const LEAST_CUT_BYTES: u64 = 4 << 10;
/// No piece is longer, whatever the mean is, so that one span alone keeps all of a device busy.
const MOST_CUT_BYTES: u64 = 1 << 20;

/// The pieces of all spans that are copied by vectors of one width.
#[derive(Clone, Copy, Default)]
struct Class {
    count: u64,
    bytes: u64,
    longest: u64,
}

impl Class {
    fn add(&mut self, bytes: u64) {
        self.count += 1;
        self.bytes += bytes;
        self.longest = self.longest.max(bytes);
    }

    /// Bytes of the longest piece after cutting. By the mean there are at most twice as many pieces as spans, and the tiles that are
    /// numbered and left empty are no more than a few for each span and each one that is needed.
    fn cut_bytes(self, width: u32) -> u64 {
        let least = if width == 16 {
            LEAST_CUT_BYTES
        } else {
            u64::from(width) * 32
        };
        let mean = self.bytes.div_ceil(self.count.max(1));
        self.longest.min(mean.next_power_of_two().clamp(least, MOST_CUT_BYTES))
    }
}

/// Bytes that go from one address to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where the first byte is read.
    pub src: u64,
    /// Where it is written.
    pub dst: u64,
    /// How many there are.
    pub bytes: u64,
}

/// Fills jobs, which are empty, with those of a plan of spans.
pub(super) fn fill(jobs: &mut Jobs, plan: &Plan, bases: Bases<'_>) -> Result<()> {
    fill_from(jobs, |f| each_of_plan(plan, bases, f))
}

/// The same for runs.
pub(super) fn fill_runs(jobs: &mut Jobs, runs: &[Run]) -> Result<()> {
    fill_from(jobs, |f| {
        let mut next = 0;
        for &Run { src, dst, bytes } in runs {
            let inside = |start: u64| start.checked_add(bytes).is_some();
            if !inside(src) || !inside(dst) {
                let message = format!("`{bytes}` bytes from `{src:#x}` to `{dst:#x}` leave the address space");
                return Err(Error::new(ErrorKind::Region, "copy spans", message));
            }
            let logical = next;
            f(Lane {
                src,
                dst,
                logical,
                bytes,
            });
            next += bytes;
        }
        Ok(())
    })
}

/// Every span of a plan as a run, for who copies each by itself.
///
/// # Errors
/// As [`Jobs::fill`]; the list is of no use then.
pub(crate) fn runs_of(plan: &Plan, src_bases: &[u64], dst_bases: &[u64], runs: &mut Vec<Run>) -> Result<()> {
    runs.clear();
    let bases = Bases {
        src: src_bases,
        dst: dst_bases,
    };
    each_of_plan(plan, bases, &mut |Lane { src, dst, bytes, .. }| {
        runs.push(Run { src, dst, bytes });
    })
}

/// Fills jobs from what `each` calls its argument with, twice the same.
fn fill_from(jobs: &mut Jobs, each: impl Fn(&mut dyn FnMut(Lane)) -> Result<()>) -> Result<()> {
    let mut classes = [Class::default(); Entry::WIDTHS.len()];
    each(&mut |lane| split(lane, &mut |class, piece| classes[class].add(piece.bytes)))?;
    let mut places = [None; Entry::WIDTHS.len()];
    for ((class, width), place) in classes.iter().zip(Entry::WIDTHS).zip(&mut places) {
        if class.count > 0 {
            *place = Some(jobs.list.len());
            jobs.add(one_piece(class.cut_bytes(width)), 1);
        }
    }
    let mut cut = |class: usize, piece: Lane| {
        let Some(job) = places[class].and_then(|place| jobs.list.get_mut(place)) else {
            return;
        };
        let cut = job.shape.chunk_bytes;
        for start in (0..piece.bytes).step_by(cut as usize) {
            job.lanes.push(Lane {
                src: piece.src + start,
                dst: piece.dst + start,
                logical: piece.logical + start,
                bytes: cut.min(piece.bytes - start),
            });
        }
    };
    each(&mut |lane| split(lane, &mut cut))
}

/// Calls `f` with every span of a plan.
fn each_of_plan(plan: &Plan, bases: Bases<'_>, f: &mut dyn FnMut(Lane)) -> Result<()> {
    let mut failed: Option<Error> = None;
    let mut next = 0;
    let _ = plan.walk(0..plan.unit_count(), |run| {
        match whole(&run, bases, next) {
            Ok(lane) => f(lane),
            Err(error) => {
                failed = Some(error);
                return ControlFlow::Break(());
            }
        }
        next += run.len;
        ControlFlow::Continue(())
    });
    failed.map_or(Ok(()), Err)
}

fn whole(run: &CopyRun, bases: Bases<'_>, logical: u64) -> Result<Lane> {
    Ok(Lane {
        src: address(bases.src, run.src)?,
        dst: address(bases.dst, run.dst)?,
        logical,
        bytes: run.len,
    })
}

/// Cuts a span into a middle that is aligned at both ends and on both sides, and what is left before and after it.
fn split(lane: Lane, f: &mut impl FnMut(usize, Lane)) {
    let single = Entry::WIDTHS.len() - 1;
    let class = class_of(lane.src ^ lane.dst);
    let width = u64::from(Entry::WIDTHS[class]);
    let head = lane.src.wrapping_neg() % width;
    let middle = lane.bytes.saturating_sub(head) / width * width;
    if middle == 0 {
        f(single, lane);
        return;
    }
    let part = |start: u64, bytes: u64| Lane {
        src: lane.src + start,
        dst: lane.dst + start,
        logical: lane.logical + start,
        bytes,
    };
    for (class, start, bytes) in [
        (single, 0, head),
        (class, head, middle),
        (single, head + middle, lane.bytes - head - middle),
    ] {
        if bytes > 0 {
            f(class, part(start, bytes));
        }
    }
}

/// The number of the widest vector that fits two addresses which differ in these bits.
fn class_of(difference: u64) -> usize {
    let fits = |width: &u32| difference.is_multiple_of(u64::from(*width));
    Entry::WIDTHS.iter().position(fits).unwrap_or(Entry::WIDTHS.len() - 1)
}

/// A page of one piece, and no tables.
fn one_piece(chunk_bytes: u64) -> Shape {
    let side = Side {
        page_stride: 0,
        parts: 1,
        part_stride: 0,
    };
    let axis = Axis {
        count: 1,
        src_stride: 0,
        dst_stride: 0,
        logical_stride: 0,
    };
    Shape {
        chunk_bytes,
        src: side,
        dst: side,
        axes: [axis; 2],
    }
}
