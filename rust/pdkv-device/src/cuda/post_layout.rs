//! What the tables of a post are and how they lie side by side, as numbers.

use pdkv_core::{Error, ErrorKind, Result};

use crate::kernels::{Entry, Job, Jobs, PageTables, Side};

/// How the tables of a post lie, on both sides: offsets in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Layout {
    /// Lanes, at the front, since those that last go elsewhere than the rest; 0 for those that lie on the device already.
    pub(super) lanes: usize,
    pub(super) src: Option<usize>,
    pub(super) dst: Option<usize>,
    /// Checksums, at the end: as many rows of them, one for each page, as a page has sums.
    pub(super) sums: usize,
    pub(super) total: usize,
}

impl Layout {
    pub(super) fn of(jobs: &Jobs, lanes_found: bool, page_sums: u8) -> Self {
        let lanes: usize = jobs.list.iter().map(|job| size_of_val(job.lanes.as_slice())).sum();
        let lanes = if lanes_found { 0 } else { lanes };
        let mut next = lanes;
        let mut place = |bytes: usize| {
            let offset = next.next_multiple_of(16);
            next = offset + bytes;
            offset
        };
        let PageTables { src, dst } = &jobs.tables;
        let src = src.as_ref().map(|pages| place(size_of_val(pages.as_slice())));
        let dst = dst.as_ref().map(|pages| place(size_of_val(pages.as_slice())));
        let sums = place(jobs.num_pages() as usize * usize::from(page_sums) * size_of::<u64>());
        Self {
            lanes,
            src,
            dst,
            sums,
            total: next,
        }
    }

    /// Where the checksums of a launch begin: those of what was placed behind those of what was read.
    pub(super) fn sums_of(&self, entry: Entry) -> usize {
        match entry {
            Entry::ReadBack { .. } => self.sums + self.num_sums() / 2 * size_of::<u64>(),
            _ => self.sums,
        }
    }

    /// How many checksums there are.
    pub(super) fn num_sums(&self) -> usize {
        (self.total - self.sums) / size_of::<u64>()
    }
}

/// Whether the tables have an entry for every page.
pub(super) fn check_tables(Jobs { list, tables, .. }: &Jobs) -> Result<()> {
    let entries = |side: fn(&Job) -> &Side| {
        let of_job = |job: &Job| job.num_pages.div_ceil(side(job).parts.max(1));
        list.iter().map(of_job).max().unwrap_or(0)
    };
    for (pages, needed) in [
        (&tables.src, entries(|job| &job.shape.src)),
        (&tables.dst, entries(|job| &job.shape.dst)),
    ] {
        if let Some(pages) = pages.as_ref().filter(|pages| pages.len() < needed as usize) {
            let message = format!("a table of `{}` pages is short of `{needed}`", pages.len());
            return Err(Error::new(ErrorKind::Layout, "copy pages", message));
        }
    }
    Ok(())
}
