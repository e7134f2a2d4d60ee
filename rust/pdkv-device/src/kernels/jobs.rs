//! The jobs of a plan: of pages one for each of its shapes, nearly always a single one; of spans one for each width of vectors.
//!
//! Addresses are the caller's: where each region of the two sides lies for the device that copies.

use pdkv_core::plan::{Geometry, Place, Plan};
use pdkv_core::{Error, ErrorKind, Result};

use super::job::{Job, PageTables, Shape};
use super::spans::{self, Run};
use super::view::Lane;

/// The jobs of a plan and the tables that they share. Filled again and again, it stops allocating.
#[derive(Debug, Default)]
pub struct Jobs {
    /// The jobs; they write different bytes and may run in any order.
    pub list: Vec<Job>,
    /// The pages of both sides.
    pub tables: PageTables,
    /// Whether other plans between the same two caches have the same lanes.
    pub lasting: bool,
    spare_lanes: Vec<Vec<Lane>>,
    spare_tables: Vec<Vec<u32>>,
}

impl Jobs {
    /// The jobs of a plan whose regions lie at these addresses. Checksums weigh a byte by its place in the plan.
    ///
    /// # Errors
    /// `Region` when the plan names a region without an address, or an address leaves 64 bits.
    pub fn of(plan: &Plan, src_bases: &[u64], dst_bases: &[u64]) -> Result<Self> {
        let mut jobs = Self::default();
        jobs.fill(plan, src_bases, dst_bases)?;
        Ok(jobs)
    }

    /// The jobs of another plan.
    ///
    /// # Errors
    /// As [`Jobs::of`]; there are no jobs then.
    pub fn fill(&mut self, plan: &Plan, src_bases: &[u64], dst_bases: &[u64]) -> Result<()> {
        self.clear();
        let bases = Bases {
            src: src_bases,
            dst: dst_bases,
        };
        let filled = match plan.geometry() {
            Some(geometry) => self.fill_pages(geometry, bases),
            None => spans::fill(self, plan, bases),
        };
        filled.inspect_err(|_| self.clear())
    }

    /// The jobs of runs, whose destinations must not overlap.
    ///
    /// # Errors
    /// `Region` when a run leaves 64 bits; there are no jobs then.
    pub fn fill_runs(&mut self, runs: &[Run]) -> Result<()> {
        self.clear();
        spans::fill_runs(self, runs).inspect_err(|_| self.clear())
    }

    /// Bytes of all jobs.
    pub fn total_bytes(&self) -> u64 {
        self.list.iter().map(Job::total_bytes).sum()
    }

    /// Pages of the job that has most of them.
    pub fn num_pages(&self) -> u32 {
        self.list.iter().map(|job| job.num_pages).max().unwrap_or(0)
    }

    fn clear(&mut self) {
        self.lasting = false;
        self.tables.clear(&mut self.spare_tables);
        for mut job in self.list.drain(..) {
            job.lanes.clear();
            self.spare_lanes.push(job.lanes);
        }
    }

    fn fill_pages(&mut self, geometry: Geometry<'_>, bases: Bases<'_>) -> Result<()> {
        self.lasting = true;
        for shape in geometry.shapes() {
            self.add(Shape::of(&shape), geometry.positions());
        }
        let mut next = 0;
        for lane in geometry.lanes() {
            let job = &mut self.list[lane.shape];
            job.lanes.push(Lane {
                src: address(bases.src, lane.src)?,
                dst: address(bases.dst, lane.dst)?,
                logical: next,
                bytes: job.shape.chunk_bytes,
            });
            next += job.shape.page_bytes();
        }
        self.list.retain(|job| !job.lanes.is_empty());
        self.tables.fill(geometry, &mut self.spare_tables);
        Ok(())
    }

    /// A further job, still without lanes.
    pub(super) fn add(&mut self, shape: Shape, num_pages: u32) -> &mut Job {
        let lanes = self.spare_lanes.pop().unwrap_or_default();
        self.list.push(Job {
            shape,
            lanes,
            num_pages,
        });
        let last = self.list.len() - 1;
        &mut self.list[last]
    }
}

/// Where the regions of both sides lie.
#[derive(Clone, Copy)]
pub(super) struct Bases<'a> {
    pub(super) src: &'a [u64],
    pub(super) dst: &'a [u64],
}

pub(super) fn address(bases: &[u64], place: Place) -> Result<u64> {
    bases
        .get(place.region as usize)
        .and_then(|base| base.checked_add(place.offset))
        .ok_or_else(|| {
            let message = format!("region `{}` has no address for offset `{}`", place.region, place.offset);
            Error::new(ErrorKind::Region, "copy pages", message)
        })
}
