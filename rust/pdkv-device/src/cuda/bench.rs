//! Copies by the device's own clock: what is measured once, to find the way that is faster.

use pdkv_core::{Error, ErrorKind, Result};

use super::pages::Kernels;
use super::queue::{CopyQueue, Ticket};
use super::stream::{Event, Stream};
use crate::kernels::{Jobs, Wishes};

const MEASURE: &str = "measure copies";

/// A queue whose copies are timed. The kernels keep it for good, some MiB: freeing its tables would wait for all that an LLM engine has asked of the
/// device, and keep it from asking more.
pub(super) struct Bench {
    queue: CopyQueue,
    begin: Event,
    end: Event,
}

// The kernels keep it, and it them.
impl std::fmt::Debug for Bench {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bench").finish_non_exhaustive()
    }
}

impl Bench {
    /// The one that is kept, made if there is none.
    ///
    /// # Errors
    /// `Device` when there is no room for its tables.
    pub(super) fn kept<'a>(kept: &'a mut Option<Self>, kernels: &Kernels) -> Result<&'a mut Self> {
        if let Some(bench) = kept {
            return Ok(bench);
        }
        let context = kernels.context();
        Ok(kept.insert(Self {
            queue: CopyQueue::new(kernels)?,
            begin: Event::timed(context)?,
            end: Event::timed(context)?,
        }))
    }

    pub(super) fn stream(&self) -> &Stream {
        self.queue.stream()
    }

    /// The device's time for one of several copies that are posted one behind the other, in microseconds. Waits for them.
    ///
    /// # Errors
    /// Those of the copies, and `Internal` when they have no room beside each other.
    pub(super) fn time_us(
        &mut self,
        rounds: u32,
        mut post: impl FnMut(&mut CopyQueue) -> Result<Option<Ticket>>,
    ) -> Result<f64> {
        self.begin.record(self.queue.stream())?;
        let mut tickets = Vec::new();
        for _ in 0..rounds {
            tickets.push(post(&mut self.queue)?.ok_or_else(no_room)?);
        }
        self.end.record(self.queue.stream())?;
        for ticket in tickets {
            self.queue.wait(ticket)?;
        }
        self.end.synchronize()?;
        Ok(self.end.elapsed_us(&self.begin)? / f64::from(rounds))
    }

    /// Copies by a kernel that loads and stores, and gives the checksums of the pages that it read. Waits.
    ///
    /// # Errors
    /// As [`Bench::time_us`].
    ///
    /// # Safety
    /// As for [`CopyQueue::post`], until this returns; where it fails, as long as the device may still copy.
    pub(super) unsafe fn sums(&mut self, jobs: &Jobs) -> Result<Vec<u64>> {
        let wishes = Wishes {
            sums: true,
            ..Wishes::default()
        };
        // SAFETY: as the caller promises.
        let ticket = unsafe { self.queue.post(jobs, wishes) }?.ok_or_else(no_room)?;
        self.queue.wait(ticket)?;
        self.queue
            .take_sums(ticket)
            .ok_or_else(|| Error::new(ErrorKind::Internal, MEASURE, "a copy with sums has none"))
    }
}

fn no_room() -> Error {
    Error::new(ErrorKind::Internal, MEASURE, "a queue of few copies has no room")
}
