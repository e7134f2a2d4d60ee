//! Pinned host memory that device memory goes through where a link carries host memory only.
//!
//! It is bounded: a stage that is not free is waited for. What is gathered into a stage lies in the order in which it was named, one piece behind the
//! other, so that a socket sends or fills the stage as one piece.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use pdkv_core::{Error, ErrorKind, Result};

use super::gpu::Gpu;
use super::host::HostAccess;
use super::host_paths::{HostDirection, HostPath, HostPaths, LINK_BLOCKS};
use super::queue::CopyQueue;
use super::region::DeviceRegion;
use crate::kernels::{Jobs, Run, Wishes};
use crate::pool::HugePages;
use crate::region::HostRegion;

/// Bytes of one stage: as much as a thread of a host link moves in one turn.
const STAGE_BYTES: u64 = 4 << 20;
/// How long one look at the stop flag may be delayed.
const SLICE: Duration = Duration::from_millis(50);
const STAGE: &str = "stage device memory";

/// The stages of one GPU; each is made when it is first needed.
#[derive(Debug)]
pub struct Staging {
    gpu: Gpu,
    stage_bytes: u64,
    most: usize,
    /// What is to be done whatever was measured.
    paths: Option<HostPaths>,
    shelf: Mutex<Shelf>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Shelf {
    idle: Vec<Parts>,
    /// Stages that there are, idle or taken.
    made: usize,
}

/// A stage that was taken; goes back when dropped. Nothing of it is under way between calls.
#[derive(Debug)]
pub struct Stage {
    staging: Arc<Staging>,
    /// There until the drop, and not broken.
    parts: Option<Parts>,
    used: u64,
}

/// Drop order: the queue waits for what is under way, then the host's memory is let go, then the regions.
#[derive(Debug)]
struct Parts {
    queue: CopyQueue,
    access: Arc<HostAccess>,
    host: Arc<HostRegion>,
    paths: HostPaths,
    jobs: Jobs,
    /// Device address, offset in the stage, bytes.
    pieces: Vec<(u64, u64, u64)>,
    runs: Vec<Run>,
    /// The regions of the pieces.
    held: Vec<Arc<DeviceRegion>>,
}

impl Staging {
    /// Stages on a GPU, of so many bytes together; at least one.
    pub fn new(gpu: &Gpu, bytes: u64) -> Arc<Self> {
        Arc::new(Self::plain(gpu, bytes, None))
    }

    /// The same with a way to copy that no measurement changes.
    pub fn forced(gpu: &Gpu, bytes: u64, paths: HostPaths) -> Arc<Self> {
        Arc::new(Self::plain(gpu, bytes, Some(paths)))
    }

    fn plain(gpu: &Gpu, bytes: u64, paths: Option<HostPaths>) -> Self {
        let stage_bytes = STAGE_BYTES.min(bytes).max(64 << 10);
        Self {
            gpu: gpu.clone(),
            stage_bytes,
            most: ((bytes / stage_bytes) as usize).max(1),
            paths,
            shelf: Mutex::default(),
            freed: Condvar::new(),
        }
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// A free stage; waits for one, and looks at `stop` meanwhile.
    ///
    /// # Errors
    /// `TransferCancelled` when stopped, `Unsupported` or `Device` when a new stage cannot be made.
    pub fn take(self: &Arc<Self>, stop: &AtomicBool) -> Result<Stage> {
        let mut shelf = self.shelf.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::new(
                    ErrorKind::TransferCancelled,
                    STAGE,
                    "stopped while all stages were in use",
                ));
            }
            if let Some(parts) = shelf.idle.pop() {
                return Ok(self.stage(parts));
            }
            if shelf.made < self.most {
                shelf.made += 1;
                drop(shelf);
                return match Parts::new(&self.gpu, self.stage_bytes, self.paths) {
                    Ok(parts) => Ok(self.stage(parts)),
                    Err(error) => {
                        self.lose();
                        Err(error)
                    }
                };
            }
            let waited = self.freed.wait_timeout(shelf, SLICE);
            shelf = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Bytes that stages may have together.
    pub fn bytes(&self) -> u64 {
        self.stage_bytes * self.most as u64
    }

    fn stage(self: &Arc<Self>, parts: Parts) -> Stage {
        Stage {
            staging: Arc::clone(self),
            parts: Some(parts),
            used: 0,
        }
    }

    /// A stage is no more: another may be made.
    fn lose(&self) {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner).made -= 1;
        self.freed.notify_one();
    }
}

impl Parts {
    fn new(gpu: &Gpu, bytes: u64, paths: Option<HostPaths>) -> Result<Self> {
        let host = HostRegion::allocate(bytes, HugePages::Try)?;
        let access = HostAccess::of(gpu, &host)?;
        let kernels = gpu.kernels()?;
        let paths = paths.map_or_else(|| HostPaths::of(kernels), Ok)?;
        Ok(Self {
            host,
            access,
            queue: CopyQueue::new(kernels)?,
            paths,
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
    /// Names the next bytes of a region, as many as there is room for: returns how many that are.
    ///
    /// # Errors
    /// `Region` when they do not lie inside, `Unsupported` when the GPU does not reach the region.
    pub fn push(&mut self, region: &Arc<DeviceRegion>, offset: u64, len: u64) -> Result<u64> {
        if offset.checked_add(len).is_none_or(|end| end > region.len()) {
            let message = format!("`{len}` bytes at `{offset}` leave a region of `{}` bytes", region.len());
            return Err(Error::new(ErrorKind::Region, STAGE, message));
        }
        region
            .reached_by(&self.staging.gpu)
            .map_err(|reason| Error::new(ErrorKind::Unsupported, STAGE, reason))?;
        let len = len.min(self.staging.stage_bytes - self.used);
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
        &self.staging.gpu
    }

    /// Whether there is no room for another byte.
    pub fn is_full(&self) -> bool {
        self.used == self.staging.stage_bytes
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
    /// `Device` when the copy fails: the stage is of no use then.
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
        let used = self.used;
        let parts = usable(&mut self.parts)?;
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
        let outcome = parts.run(direction, used);
        if outcome.is_err() {
            self.parts = None;
            self.staging.lose();
        }
        outcome
    }
}

impl Parts {
    fn run(&mut self, direction: HostDirection, bytes: u64) -> Result<()> {
        let path = self.paths.choose(direction, bytes, self.runs.len() as u64);
        let ticket = match path {
            // SAFETY: the pieces lie in device regions that are held and in the stage's own memory; both are waited for below. Whoever
            // writes the same device memory meanwhile writes foreign bytes, which is no business of the memory's safety.
            HostPath::Batch => unsafe { self.queue.post_batch(&self.runs) }?,
            HostPath::Kernel => {
                self.jobs.fill_runs(&self.runs)?;
                let wishes = Wishes {
                    most_blocks: Some(LINK_BLOCKS),
                    ..Wishes::default()
                };
                // SAFETY: as above.
                let posted = unsafe { self.queue.post(&self.jobs, wishes, None) }?;
                posted.ok_or_else(|| Error::new(ErrorKind::Internal, STAGE, "an idle queue has no room"))?
            }
        };
        self.queue.wait(ticket)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some(mut parts) = self.parts.take() {
            parts.clear();
            self.staging
                .shelf
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .idle
                .push(parts);
            self.staging.freed.notify_one();
        }
    }
}

fn usable(parts: &mut Option<Parts>) -> Result<&mut Parts> {
    parts.as_mut().ok_or_else(broken)
}

fn broken() -> Error {
    Error::new(ErrorKind::Device, STAGE, "an earlier copy of this stage failed")
}
