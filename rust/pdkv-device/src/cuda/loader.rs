//! Puts cargo onto a queue by the route that its memory has. It keeps what it makes of plans, so that posting allocates nothing once warm.

use pdkv_core::Result;

use super::bulk_size::BulkSize;
use super::flight::Cargo;
use super::gpu::Gpu;
use super::host_paths::HostPaths;
use super::pages::Kernels;
use super::queue::{CopyQueue, Ticket};
use super::reach::{Reach, Side};
use super::route::Route;
use crate::kernels::{Jobs, Run, runs_of};

#[derive(Debug)]
pub(super) struct Loader {
    kernels: Kernels,
    /// What is to be taken as measured, whatever was.
    forced: Option<(HostPaths, BulkSize)>,
    jobs: Jobs,
    runs: Vec<Run>,
    addresses: [Vec<u64>; 2],
    sides: [Vec<Side>; 2],
}

impl Loader {
    pub(super) fn new(kernels: &Kernels, forced: Option<(HostPaths, BulkSize)>) -> Self {
        Self {
            kernels: kernels.clone(),
            forced,
            jobs: Jobs::default(),
            runs: Vec::new(),
            addresses: Default::default(),
            sides: Default::default(),
        }
    }

    /// Posts cargo; `None`, and nothing happened, while earlier posts leave no room.
    ///
    /// # Errors
    /// As [`CopyQueue::post`], and `Device` when the stream cannot be made to wait. Nothing was posted then.
    ///
    /// # Safety
    /// The plan must stay inside the cargo's memory, the GPU must reach that, and it must be kept until the post has passed.
    pub(super) unsafe fn load<T>(
        &mut self,
        gpu: &Gpu,
        queue: &mut CopyQueue,
        cargo: &Cargo<T>,
    ) -> Result<Option<Ticket>> {
        for ((reaches, addresses), sides) in [&cargo.src, &cargo.dst]
            .into_iter()
            .zip(&mut self.addresses)
            .zip(&mut self.sides)
        {
            addresses.clear();
            addresses.extend(reaches.iter().map(Reach::device_address));
            sides.clear();
            sides.extend(reaches.iter().map(|reach| reach.side(gpu)));
        }
        let plan = &cargo.plan;
        let (paths, bulk) = match self.forced {
            Some((paths, bulk)) => (Some(paths), bulk.bytes()),
            None => (HostPaths::known(&self.kernels), BulkSize::known(&self.kernels)),
        };
        // Only kernels see what they copy.
        let paths = paths.filter(|_| !cargo.verify);
        let ([src, dst], [from, to]) = (&self.addresses, &self.sides);
        match Route::of(from, to, [plan.total_bytes(), plan.run_count()], paths, bulk) {
            Route::Kernel(wishes) => {
                self.jobs.fill(plan, src, dst)?;
                come_after(queue, cargo)?;
                if cargo.verify {
                    // SAFETY: as the caller promises.
                    unsafe { queue.post_verified(&self.jobs, wishes) }
                } else {
                    // SAFETY: as the caller promises.
                    unsafe { queue.post(&self.jobs, wishes) }
                }
            }
            Route::Batch => {
                runs_of(plan, src, dst, &mut self.runs)?;
                come_after(queue, cargo)?;
                // SAFETY: as the caller promises; a plan writes no byte twice, and one end of this one is the host's, the other the GPU's.
                unsafe { queue.post_batch(&self.runs) }.map(Some)
            }
        }
    }
}

fn come_after<T>(queue: &CopyQueue, cargo: &Cargo<T>) -> Result<()> {
    cargo.after.as_ref().map_or(Ok(()), |event| queue.stream().wait(event))
}
