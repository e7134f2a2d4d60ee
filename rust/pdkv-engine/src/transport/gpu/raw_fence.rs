//! The fence of raw transfers with memory of a GPU that its owner's allocator may replace: after the last byte the owner is asked whether that is still the
//! memory it registered, and only then is the transfer done. One question at a time for each peer, for all transfers that have landed by then; their
//! drivers may be slow, so they are asked on a thread that nobody else waits for.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use pdkv_core::id::RegionId;
use pdkv_core::{Error, ErrorKind, Result};

use super::super::Work;
use crate::door::LocalDoor;
use crate::raw::Raw;
use crate::remote::RemoteRegion;

/// Of one peer.
pub(super) struct RawFence {
    /// Whom to ask; `None` for a peer in this very process, whose memory can be looked at.
    door: Option<LocalDoor>,
    landed: Mutex<Landed>,
}

#[derive(Default)]
struct Landed {
    /// Some thread asks, or is about to.
    asked: bool,
    works: Vec<Arc<Work>>,
}

impl RawFence {
    pub(super) fn new(door: Option<LocalDoor>) -> Arc<Self> {
        Arc::new(Self {
            door,
            landed: Mutex::default(),
        })
    }

    /// Whether a work must come by here. Claims have the fence of their export.
    pub(super) fn guards(work: &Work) -> bool {
        Raw::owns(work.id()) && work.remote.iter().any(|region| region.may_move())
    }

    fn landed(&self) -> MutexGuard<'_, Landed> {
        self.landed.lock().expect("no holder panics")
    }

    /// Takes a work whose every byte has been placed. It ends when its memory has been looked at.
    pub(super) fn enter(self: &Arc<Self>, work: Arc<Work>) {
        let shared = Arc::clone(&work.shared);
        let mut landed = self.landed();
        landed.works.push(work);
        let others = std::mem::replace(&mut landed.asked, true);
        drop(landed);
        if others {
            return;
        }
        let mine = Arc::clone(self);
        if let Err(error) = shared.movers.task(move || mine.answer_all(Self::look)) {
            let text = "there is no thread on which to ask whether the peer's memory is the one that was registered";
            let refusal = Error::new(error.kind(), "cuda", text).with_hint("it may go well another time");
            self.answer_all(|_, works| {
                let regions = works.iter().flat_map(|work| work.remote.iter());
                Some(regions.map(|region| (region.id, refusal.clone())).collect())
            });
        }
    }

    /// What has landed meanwhile; `None` when nothing has, and whoever lands next has somebody ask.
    fn next(&self) -> Option<Vec<Arc<Work>>> {
        let mut landed = self.landed();
        landed.asked = !landed.works.is_empty();
        landed.asked.then(|| std::mem::take(&mut landed.works))
    }

    fn answer_all(&self, look: impl Fn(&Self, &[Arc<Work>]) -> Option<BTreeMap<RegionId, Error>>) {
        while let Some(works) = self.next() {
            // Whoever is over waits for nobody's answer: its bytes are placed, and nothing touches its memory any more.
            let (over, works): (Vec<_>, Vec<_>) = works.into_iter().partition(|work| work.stopped());
            for work in over {
                work.leave();
            }
            if works.is_empty() {
                continue;
            }
            let Some(faults) = look(self, &works) else {
                self.landed().works.extend(works);
                continue;
            };
            for work in works {
                let mut regions = work.remote.iter();
                if let Some(error) = regions.find_map(|region| faults.get(&region.id)) {
                    work.fail(error.clone());
                }
                work.leave();
            }
        }
    }

    /// What is wrong with the memory of these works, region by region; `None` when one of them, or one that has landed
    /// since, was over before the answer came.
    fn look(&self, works: &[Arc<Work>]) -> Option<BTreeMap<RegionId, Error>> {
        let wanted = works.iter().flat_map(|work| work.remote.iter());
        let wanted: BTreeMap<_, _> = wanted
            .filter(|region| region.may_move())
            .map(|region| (region.id, region))
            .collect();
        let mut faults = BTreeMap::new();
        let Some(door) = &self.door else {
            let found = wanted.into_iter().map(|(id, region)| (id, look_here(region)));
            return Some(found.filter_map(|(id, found)| Some((id, found.err()?))).collect());
        };
        let named: Vec<_> = wanted.values().map(|region| (region.id, region.len)).collect();
        // Also those that have landed since, who wait for this answer to be asked about.
        let over = |works: &[Arc<Work>]| works.iter().any(|work| work.stopped());
        let stopped = || over(works) || over(&self.landed().works);
        let asked = door.still_there(&named, &stopped, |id, error| {
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
        for (id, error) in faults.iter().filter(|(_, error)| error.kind() == ErrorKind::Region) {
            // It shows what was there before, to whoever comes.
            wanted[id].views.spoil(error.message());
        }
        Some(faults)
    }
}

/// Looks at memory of an engine in this process.
fn look_here(region: &RemoteRegion) -> Result<()> {
    let mapped = region.mapping.now();
    let device = mapped.as_ref().and_then(|mapped| mapped.memory.device());
    device.map_or(Ok(()), |device| device.still_there())
}
