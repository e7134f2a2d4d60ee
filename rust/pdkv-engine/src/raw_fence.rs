//! The fence of raw transfers with memory of GPUs that an allocator may replace: after the last byte whoever has such memory looks whether that is still the
//! memory that was registered, and only then is the transfer done, whatever has moved it. One question at a time for each peer, for all transfers whose bytes
//! have been placed by then; drivers may be slow, so they are asked on a thread that nobody else waits for. Claims have the fence of their export.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use pdkv_core::id::RegionId;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Memory;
use pdkv_device::cuda::Witnesses;

use crate::look::Inquiry;
use crate::mover::contained;
use crate::remote::RemoteRegion;
use crate::transport::Work;

/// Of one peer.
pub(crate) struct RawFence {
    /// How its engine is asked. Memory of an engine in this very process is looked at.
    inquiry: Inquiry,
    landed: Mutex<Landed>,
}

#[derive(Default)]
struct Landed {
    /// Some thread asks, or is about to.
    asked: bool,
    works: Vec<Placed>,
}

/// A work whose every byte has been placed, and how many they are.
struct Placed {
    work: Arc<Work>,
    bytes: u64,
}

impl Placed {
    fn end(self, outcome: Result<()>) {
        let bytes = self.bytes;
        self.work.report(outcome.map(|()| bytes));
    }
}

/// What is wrong with memory of the peer's, region by region.
type Faults = BTreeMap<RegionId, Error>;

impl RawFence {
    pub(crate) fn new(inquiry: Inquiry) -> Arc<Self> {
        Arc::new(Self {
            inquiry,
            landed: Mutex::default(),
        })
    }

    /// Whether a raw transfer between these must come by here.
    pub(crate) fn guards(local: &[Memory], remote: &[Arc<RemoteRegion>]) -> bool {
        remote.iter().any(|region| region.may_move()) || !witnesses(local).is_empty()
    }

    /// The peer is lost: nothing is kept open to it.
    pub(crate) fn shut_down(&self) {
        self.inquiry.shut_down();
    }

    fn landed(&self) -> MutexGuard<'_, Landed> {
        self.landed.lock().expect("no holder panics")
    }

    /// Takes a work whose every byte has been placed. It ends when its memory has been looked at.
    pub(crate) fn enter(self: &Arc<Self>, work: Arc<Work>, bytes: u64) {
        let shared = Arc::clone(&work.shared);
        let mut landed = self.landed();
        landed.works.push(Placed { work, bytes });
        let others = std::mem::replace(&mut landed.asked, true);
        drop(landed);
        if others {
            return;
        }
        let mine = Arc::clone(self);
        if let Err(error) = shared.movers.task(move || mine.answer_all(Self::look)) {
            let text = "there is no thread on which to ask whether the peer's memory is the one that was registered";
            let refusal = Error::new(error.kind(), "fence", text).with_hint("it may go well another time");
            self.answer_all(|_, works| Some(all_of(works, &refusal)));
        }
    }

    /// What has landed meanwhile; `None` when nothing has, and whoever lands next has somebody ask.
    fn next(&self) -> Option<Vec<Placed>> {
        let mut landed = self.landed();
        landed.asked = !landed.works.is_empty();
        landed.asked.then(|| std::mem::take(&mut landed.works))
    }

    fn answer_all(&self, look: impl Fn(&Self, &[Placed]) -> Option<Faults>) {
        while let Some(works) = self.next() {
            // After a panic it is gone on with those that came meanwhile; the works of this look fail when they are dropped.
            let _ = contained(|| self.answer(works, &look));
        }
    }

    fn answer(&self, works: Vec<Placed>, look: impl Fn(&Self, &[Placed]) -> Option<Faults>) {
        // Whoever is over waits for nobody's answer: its bytes are placed, and nothing touches its memory any more.
        let (over, works): (Vec<_>, Vec<_>) = works.into_iter().partition(|placed| placed.work.stopped());
        for placed in over {
            placed.end(Ok(()));
        }
        if works.is_empty() {
            return;
        }
        let Some(faults) = look(self, &works) else {
            return self.landed().works.extend(works);
        };
        for placed in works {
            let mut regions = placed.work.remote.iter();
            let fault = regions.find_map(|region| faults.get(&region.id).cloned());
            let ours = || witnesses(&placed.work.local).still_there();
            let outcome = fault.map_or_else(ours, Err);
            placed.end(outcome);
        }
    }

    /// What is wrong with the peer's memory of these works; `None` when one of them, or one that has landed
    /// since, was over before the answer came.
    fn look(&self, works: &[Placed]) -> Option<Faults> {
        let regions = works.iter().flat_map(|placed| placed.work.remote.iter());
        let movable = regions.filter(|region| region.may_move());
        let wanted: BTreeMap<_, _> = movable.map(|region| (region.id, region)).collect();
        let (here, there): (BTreeMap<_, _>, BTreeMap<_, _>) =
            wanted.into_iter().partition(|(_, region)| region.gpu_here().is_some());
        let looked = here.into_iter().map(|(id, region)| (id, look_here(region)));
        let mut faults: Faults = looked.filter_map(|(id, found)| Some((id, found.err()?))).collect();
        if there.is_empty() {
            return Some(faults);
        }
        let named: Vec<_> = there.values().map(|region| (region.id, region.len)).collect();
        // Also those that have landed since, who wait for this answer to be asked about.
        let over = |works: &[Placed]| works.iter().any(|placed| placed.work.stopped());
        let stopped = || over(works) || over(&self.landed().works);
        let asked = self.inquiry.still_there(&named, &stopped, &mut |id, error| {
            faults.insert(id, error);
        });
        if let Err(error) = asked {
            if stopped() {
                return None;
            }
            for (id, _) in named {
                faults.entry(id).or_insert_with(|| error.clone());
            }
        }
        for (id, region) in there {
            // It shows what was there before, to whoever comes.
            if let Some(error) = faults.get(&id).filter(|error| error.kind() == ErrorKind::Region) {
                region.views.spoil(error.message());
            }
        }
        Some(faults)
    }
}

/// The same of every region.
fn all_of(works: &[Placed], error: &Error) -> Faults {
    let regions = works.iter().flat_map(|placed| placed.work.remote.iter());
    regions.map(|region| (region.id, error.clone())).collect()
}

fn witnesses(local: &[Memory]) -> Witnesses {
    Witnesses::of(local.iter().filter_map(Memory::device))
}

/// Looks at memory of an engine in this process.
fn look_here(region: &RemoteRegion) -> Result<()> {
    let mapped = region.mapping.now();
    let device = mapped.as_ref().and_then(|mapped| mapped.memory.device());
    device.map_or(Ok(()), |device| device.still_there())
}

#[cfg(test)]
#[path = "raw_fence_tests.rs"]
mod tests;
