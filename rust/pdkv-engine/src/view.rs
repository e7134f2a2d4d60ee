//! What our GPUs see of one region of a peer: for each of them a mapping, or why there is none. Whoever first wants one makes
//! it, and the others wait for it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pdkv_core::id::RegionId;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Memory;
use pdkv_device::cuda::{Gpu, HostAccess, Reach};

use crate::remote::RemoteRegion;

/// How long somebody who waits takes to see that its transfer is to stop.
const SLICE: Duration = Duration::from_millis(20);

/// Whether a failure to reach memory is one that will come again whenever it is tried.
pub(crate) fn lasts(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Region)
}

/// How long nobody asks again for memory that its owner could not lend, or that a driver would not map: other ways are taken meanwhile.
pub(crate) const AGAIN: Duration = Duration::from_secs(5);

enum View {
    Pending,
    Ready(Reach),
    Impossible(String),
    /// Not until then.
    Refused(Error, Instant),
}

impl View {
    /// Whether it is as if nobody had asked.
    fn is_over(&self) -> bool {
        matches!(self, Self::Refused(_, until) if *until <= Instant::now())
    }
}

/// The views of one region, by the number of the GPU.
#[derive(Default)]
pub(crate) struct Views {
    book: Mutex<BTreeMap<u32, View>>,
    settled: Condvar,
    /// Bits by number: those GPUs that have a view. Written with the book; a transfer of many regions reads nothing else of most.
    ready: AtomicU64,
}

/// How often views were spoiled, of whatever region: what was found of many views holds until the next time.
static SPOILS: AtomicU64 = AtomicU64::new(0);

pub(crate) fn spoils() -> u64 {
    SPOILS.load(Ordering::Acquire)
}

/// The bit of a GPU; none for numbers that no machine has.
pub(crate) fn bit(gpu: &Gpu) -> u64 {
    1_u64.checked_shl(gpu.ordinal()).unwrap_or(0)
}

impl Views {
    fn book(&self) -> MutexGuard<'_, BTreeMap<u32, View>> {
        self.book.lock().expect("no holder panics")
    }

    /// Whether the caller is to make this view and then to settle it: nobody has, and nobody is about to.
    fn claim(&self, gpu: &Gpu) -> bool {
        let mut book = self.book();
        let fresh = book.get(&gpu.ordinal()).is_none_or(View::is_over);
        if fresh {
            book.insert(gpu.ordinal(), View::Pending);
        }
        fresh
    }

    /// Says what became of a claimed view; what was said before stands. What the owner or a driver could not do just now is tried again some seconds
    /// later; any other failure that may not come again, such as that of a transfer that was to stop, leaves it to the next one who wants it.
    pub(crate) fn settle(&self, gpu: &Gpu, outcome: &Result<Reach>) {
        let mut book = self.book();
        if let Some(view @ View::Pending) = book.get_mut(&gpu.ordinal()) {
            match outcome {
                Ok(reach) => {
                    *view = View::Ready(reach.clone());
                    self.ready.fetch_or(bit(gpu), Ordering::Release);
                }
                Err(error) if lasts(error) => *view = View::Impossible(error.message().to_owned()),
                Err(error) if matches!(error.kind(), ErrorKind::Transfer | ErrorKind::Device) => {
                    *view = View::Refused(error.clone(), Instant::now() + AGAIN);
                }
                Err(_) => {
                    book.remove(&gpu.ordinal());
                }
            }
        }
        drop(book);
        self.settled.notify_all();
    }

    /// What all views showed is not what its owner has there; whoever comes later is told.
    pub(crate) fn spoil(&self, reason: &str) {
        let gone = || View::Impossible(reason.to_owned());
        let mut book = self.book();
        self.ready.store(0, Ordering::Release);
        // Last: who counts it finds none ready.
        SPOILS.fetch_add(1, Ordering::Release);
        let shown: Vec<_> = book.values_mut().map(|view| std::mem::replace(view, gone())).collect();
        drop(book);
        self.settled.notify_all();
        // Not under the lock: unmapping waits for the driver.
        drop(shown);
    }

    /// Whether there is a view.
    pub(crate) fn is_ready(&self, gpu: &Gpu) -> bool {
        self.shows(bit(gpu))
    }

    /// The same of the GPU with this bit.
    pub(crate) fn shows(&self, bit: u64) -> bool {
        self.ready.load(Ordering::Acquire) & bit != 0
    }

    /// Views of the GPUs with these bits, as far as anybody asks without looking at them.
    #[cfg(test)]
    pub(crate) fn ready(bits: u64) -> Self {
        Self {
            ready: bits.into(),
            ..Self::default()
        }
    }

    /// The view, without waiting.
    pub(crate) fn now(&self, gpu: &Gpu) -> Option<Result<Reach, String>> {
        match self.book().get(&gpu.ordinal())? {
            View::Pending => None,
            View::Ready(reach) => Some(Ok(reach.clone())),
            View::Impossible(reason) => Some(Err(reason.clone())),
            view if view.is_over() => None,
            View::Refused(error, _) => Some(Err(error.message().to_owned())),
        }
    }

    /// The view; waits while it is being made, as long as the transfer isn't told to stop. `None` when nobody makes it (any
    /// more).
    pub(crate) fn wait(&self, gpu: &Gpu, stopped: &dyn Fn() -> bool) -> Result<Option<Reach>> {
        let mut book = self.book();
        loop {
            match book.get(&gpu.ordinal()) {
                None => return Ok(None),
                Some(view) if view.is_over() => return Ok(None),
                Some(View::Refused(error, _)) => return Err(error.clone()),
                Some(View::Ready(reach)) => return Ok(Some(reach.clone())),
                Some(View::Impossible(reason)) => {
                    let text = format!(
                        "memory of the peer can't be mapped for GPU `{}`: {reason}",
                        gpu.ordinal()
                    );
                    return Err(Error::new(ErrorKind::Region, "cuda", text));
                }
                Some(View::Pending) if stopped() => {
                    return Err(Error::new(
                        ErrorKind::TransferCancelled,
                        "cuda",
                        "stopped while mapping",
                    ));
                }
                Some(View::Pending) => book = self.settled.wait_timeout(book, SLICE).expect("no holder panics").0,
            }
        }
    }
}

/// Views of a GPU that somebody is to make and to settle, each of them; whoever panics before that leaves them to the next one.
pub(crate) struct ClaimedViews<'a> {
    gpu: &'a Gpu,
    regions: Vec<&'a RemoteRegion>,
}

impl<'a> ClaimedViews<'a> {
    /// Those of these regions that nobody has made, or is about to make.
    pub(crate) fn of(gpu: &'a Gpu, regions: impl IntoIterator<Item = &'a RemoteRegion>) -> Self {
        let open = regions.into_iter().filter(|region| region.views.claim(gpu));
        Self {
            gpu,
            regions: open.collect(),
        }
    }

    pub(crate) fn regions(&self) -> &[&'a RemoteRegion] {
        &self.regions
    }

    /// Says what became of one of them; what was said before stands.
    pub(crate) fn settle(&self, id: RegionId, outcome: &Result<Reach>) {
        if let Some(region) = self.regions.iter().find(|region| region.id == id) {
            region.views.settle(self.gpu, outcome);
        }
    }
}

impl Drop for ClaimedViews<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let left = Err(Error::new(ErrorKind::TransferCancelled, "cuda", "not tried to the end"));
            for region in &self.regions {
                region.views.settle(self.gpu, &left);
            }
        }
    }
}

impl RemoteRegion {
    /// What a GPU of ours sees of memory that this process sees: all of it, or the reason why not. Blocks while memory of
    /// the host is registered with the driver.
    pub(crate) fn look(&self, gpu: &Gpu) -> Result<Reach> {
        let refuse = |reason: String| Error::new(ErrorKind::Unsupported, "cuda", reason);
        self.may_view(gpu).map_err(refuse)?;
        let mapped = self
            .mapping
            .now()
            .ok_or_else(|| refuse("it is mapped no more".to_owned()))?;
        match mapped.memory {
            Memory::Device(region) => {
                region.reached_by(gpu)?;
                Ok(Reach::Device(region))
            }
            Memory::Host(region) => HostAccess::of(gpu, &region).map(Reach::Host),
        }
    }

    /// Whether a GPU of ours sees it, as far as that is known; the reason when not.
    pub(crate) fn may_view(&self, gpu: &Gpu) -> Result<(), String> {
        if self.views.is_ready(gpu) {
            return Ok(());
        }
        self.views
            .now(gpu)
            .map_or_else(|| self.may_be_seen(), |view| view.map(drop))
    }

    /// The same for a GPU that nobody has opened, so that nothing of it is known.
    pub(crate) fn may_be_seen(&self) -> Result<(), String> {
        match self.device() {
            Some(device) if !device.sealed.is_empty() => {
                Err(format!("the peer can't share region `{}`: {}", self.id, device.sealed))
            }
            Some(_) => Ok(()),
            None if self.mapping.is_impossible() || !self.wholly_shared() => Err(format!(
                "region `{}` is private memory, which no GPU here reaches",
                self.id
            )),
            None => self.mapping.expected(),
        }
    }
}
