//! One stage: host memory of a GPU's, in which the pieces of a payload lie one behind the other.

use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};

use super::gpu::Gpu;
use super::host::HostAccess;
use super::host_paths::{HostDirection, HostPath, HostPaths, LINK_BLOCKS};
use super::pages::Kernels;
use super::peer_clock::PeerClock;
use super::queue::CopyQueue;
use super::region::DeviceRegion;
use super::staging::{STAGE, Staging, Taken};
use super::verified;
use crate::kernels::{Jobs, Run, Wishes};
use crate::pool::HugePages;
use crate::region::HostRegion;
use crate::stream::Stop;

/// A stage that was taken; goes back when dropped. Nothing of it is under way between calls.
#[derive(Debug)]
pub struct Stage {
    staging: Arc<Staging>,
    taken: Taken,
    /// There until the drop, and not broken.
    parts: Option<Parts>,
    used: u64,
}

/// Drop order: the queue waits for what is under way, then the host's memory is let go, then the regions.
#[derive(Debug)]
pub(super) struct Parts {
    queue: CopyQueue,
    access: Arc<HostAccess>,
    host: Arc<HostRegion>,
    /// What is to be done whatever was measured.
    forced: Option<HostPaths>,
    verify: bool,
    kernels: Kernels,
    jobs: Jobs,
    /// Device address, offset in the stage, bytes.
    pieces: Vec<(u64, u64, u64)>,
    runs: Vec<Run>,
    /// The regions of the pieces.
    held: Vec<Arc<DeviceRegion>>,
}

impl Parts {
    /// With so many bytes, and so many for the tables of its copies.
    pub(super) fn new(gpu: &Gpu, bytes: u64, tables: u64, forced: Option<HostPaths>, verify: bool) -> Result<Self> {
        // Of huge pages the last one would reach beyond what there may be.
        let host = HostRegion::allocate(bytes, HugePages::Never)?;
        let access = HostAccess::of(gpu, &host)?;
        let kernels = gpu.kernels()?;
        Ok(Self {
            host,
            access,
            queue: CopyQueue::small(kernels, tables as usize)?,
            forced,
            verify,
            kernels: kernels.clone(),
            jobs: Jobs::default(),
            pieces: Vec::new(),
            runs: Vec::new(),
            held: Vec::new(),
        })
    }

    fn clear(&mut self) {
        self.pieces.clear();
        self.held.clear();
    }
}

impl Stage {
    /// One that was just taken; `parts` are those that its last user left.
    pub(super) fn new(staging: &Arc<Staging>, taken: Taken, parts: Option<Parts>) -> Self {
        Self {
            staging: Arc::clone(staging),
            taken,
            parts,
            used: 0,
        }
    }

    /// Makes what no user before has left.
    pub(super) fn furnish(&mut self, make: impl FnOnce() -> Result<Parts>) -> Result<()> {
        if self.parts.is_none() {
            self.parts = Some(make()?);
        }
        Ok(())
    }

    /// Names the next bytes of a region, as many as there is room for: returns how many that are.
    ///
    /// # Errors
    /// `Region` when they do not lie inside, `Unsupported` when the GPU does not reach the region.
    pub fn push(&mut self, region: &Arc<DeviceRegion>, offset: u64, len: u64) -> Result<u64> {
        if offset.checked_add(len).is_none_or(|end| end > region.len()) {
            let message = format!("`{len}` bytes at `{offset}` leave a region of `{}` bytes", region.len());
            return Err(Error::new(ErrorKind::Region, STAGE, message));
        }
        region.reached_by(self.staging.gpu())?;
        let len = len.min(self.staging.stage_bytes() - self.used);
        let parts = usable(&mut self.parts)?;
        if len > 0 {
            parts.pieces.push((region.address() + offset, self.used, len));
            if !parts.held.last().is_some_and(|last| Arc::ptr_eq(last, region)) {
                parts.held.push(Arc::clone(region));
            }
            self.used += len;
        }
        Ok(len)
    }

    /// The GPU whose stage it is.
    pub fn gpu(&self) -> &Gpu {
        self.staging.gpu()
    }

    /// To be run while it is the peer that the stage waits for; its end ends the wait.
    pub fn clock(&self) -> &Arc<PeerClock> {
        &self.taken.clock
    }

    /// What to say when the clock has ended a wait.
    pub fn overdue(&self) -> Option<Error> {
        let text = || {
            format!(
                "the peer kept a stage of pinned memory waiting for `{:?}`, for which others wait",
                self.staging.patience()
            )
        };
        self.taken.clock.stopped().then(|| {
            Error::new(ErrorKind::TransferTimeout, STAGE, text())
                .with_hint("a peer that is stopped or very slow; more `staging_bytes` let others go on beside it")
        })
    }

    /// Whether there is no room for another byte.
    pub fn is_full(&self) -> bool {
        self.used == self.staging.stage_bytes()
    }

    /// Bytes that were named.
    pub fn bytes(&self) -> u64 {
        self.used
    }

    /// The host's side: its first [`bytes`](Self::bytes) are those that were named.
    ///
    /// # Errors
    /// `Device` when an earlier copy failed.
    pub fn host(&self) -> Result<&Arc<HostRegion>> {
        self.parts.as_ref().map(|parts| &parts.host).ok_or_else(broken)
    }

    /// Copies what was named from the device into the stage. Waits until it is there.
    ///
    /// # Errors
    /// `Device` when the copy fails, `Integrity` when it is verified and left other bytes than it read: the stage is of no use then.
    pub fn pack(&mut self) -> Result<()> {
        self.copy(HostDirection::ToHost)
    }

    /// Copies the stage to where it was named for on the device. Waits until it is there.
    ///
    /// # Errors
    /// As [`Stage::pack`].
    pub fn unpack(&mut self) -> Result<()> {
        self.copy(HostDirection::ToDevice)
    }

    /// Forgets what was named.
    pub fn clear(&mut self) {
        self.used = 0;
        if let Some(parts) = &mut self.parts {
            parts.clear();
        }
    }

    fn copy(&mut self, direction: HostDirection) -> Result<()> {
        let mut busy = Busy(self.parts.take());
        let parts = usable(&mut busy.0)?;
        let host = parts.access.device_address();
        let run = |&(device, offset, bytes): &(u64, u64, u64)| match direction {
            HostDirection::ToDevice => Run {
                src: host + offset,
                dst: device,
                bytes,
            },
            HostDirection::ToHost => Run {
                src: device,
                dst: host + offset,
                bytes,
            },
        };
        parts.runs.clear();
        parts.runs.extend(parts.pieces.iter().map(run));
        let outcome = parts.run(direction, self.used);
        // Of one that failed another is made in its place.
        self.parts = busy.0.take().filter(|_| outcome.is_ok());
        outcome
    }
}

/// Parts with a copy under way. Nobody else gets them before it has passed: whoever panics meanwhile waits for it and leaves them to nobody.
struct Busy(Option<Parts>);

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(parts) = self.0.take() {
            let _ = parts.queue.stream().synchronize();
            // The driver may not have said that it has passed.
            std::mem::forget(parts);
        }
    }
}

impl Parts {
    fn run(&mut self, direction: HostDirection, bytes: u64) -> Result<()> {
        let paths = self.forced.or_else(|| HostPaths::known(&self.kernels));
        // Only kernels see what they copy.
        let paths = paths.filter(|_| !self.verify);
        let path = paths.map(|paths| paths.choose(direction, bytes, self.runs.len() as u64));
        // What is not measured yet a kernel copies.
        match path.unwrap_or(HostPath::Kernel) {
            HostPath::Batch => {
                // SAFETY: the pieces lie in device regions that are held and in the stage's own memory; both are waited for below. Whoever
                // writes the same device memory meanwhile writes foreign bytes, which is no business of the memory's safety.
                let ticket = unsafe { self.queue.post_batch(&self.runs) }?;
                self.queue.wait(ticket)
            }
            HostPath::Kernel => self.run_by_kernel(),
        }
    }

    /// In one post, or in several where many small pieces take more tables than there is room for.
    fn run_by_kernel(&mut self) -> Result<()> {
        let wishes = Wishes {
            most_blocks: Some(LINK_BLOCKS),
            ..Wishes::default()
        };
        let (mut done, mut most) = (0, self.runs.len());
        while done < self.runs.len() {
            let some = most.min(self.runs.len() - done);
            self.jobs.fill_runs(&self.runs[done..done + some])?;
            if some > 1 && !self.queue.holds(&self.jobs) {
                most = some / 2;
                continue;
            }
            let posted = if self.verify {
                // SAFETY: as for a batch.
                unsafe { self.queue.post_verified(&self.jobs, wishes) }
            } else {
                // SAFETY: as for a batch.
                unsafe { self.queue.post(&self.jobs, wishes) }
            };
            let idle = || Error::new(ErrorKind::Internal, STAGE, "an idle queue has no room");
            let ticket = posted?.ok_or_else(idle)?;
            self.queue.wait(ticket)?;
            if self.verify {
                let bytes = self.jobs.total_bytes();
                let what = || format!("`{bytes}` bytes in `{some}` pieces that went through a stage");
                verified::whole(what, self.queue.take_sums(ticket))?;
            }
            done += some;
        }
        Ok(())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some(parts) = &mut self.parts {
            parts.clear();
        }
        self.staging.give_back(&self.taken, self.parts.take());
    }
}

fn usable(parts: &mut Option<Parts>) -> Result<&mut Parts> {
    parts.as_mut().ok_or_else(broken)
}

fn broken() -> Error {
    Error::new(ErrorKind::Device, STAGE, "an earlier copy of this stage failed")
}
