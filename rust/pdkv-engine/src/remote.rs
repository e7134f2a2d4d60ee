//! What an engine knows of a peer's memory: regions with the ways they can be reached, and caches
//! with their layouts. Everything here was said by the peer, so it is used only to reach into that
//! very peer, and only after the kernel or a mapping confirmed it.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use pdkv_core::id::{CacheId, Incarnation, RegionId};
use pdkv_core::layout::KvLayout;
use pdkv_core::wire::CacheAdvert;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::HostRegion;

use crate::transfer::TransferCore;

/// A stretch of a remote region that is visible in this process.
#[derive(Clone)]
pub(crate) struct Mapped {
    pub(crate) memory: Arc<HostRegion>,
    /// Where in the remote region the mapping starts.
    pub(crate) region_offset: u64,
}

impl Mapped {
    /// The offset in `memory` of a range of the region, when the range lies wholly inside.
    pub(crate) fn locate(&self, offset: u64, len: u64) -> Option<u64> {
        let start = offset.checked_sub(self.region_offset)?;
        (start.checked_add(len)? <= self.memory.len()).then_some(start)
    }
}

enum Mapping {
    /// The region has no shared part, or this peer's memory can't be mapped here.
    Impossible(String),
    /// Being mapped in the background.
    Pending,
    Ready(Mapped),
}

/// One region of the peer.
pub(crate) struct RemoteRegion {
    pub(crate) id: RegionId,
    pub(crate) len: u64,
    /// Where it lies in the peer's address space; given to the kernel, never dereferenced here.
    pub(crate) address: u64,
    pub(crate) raw_access: bool,
    /// The stretch (offset, length) the peer says is shared memory.
    pub(crate) shared: Option<(u64, u64)>,
    mapping: Mutex<Mapping>,
    settled: Condvar,
}

impl RemoteRegion {
    pub(crate) fn new(id: RegionId, len: u64, address: u64, raw_access: bool, shared: Option<(u64, u64)>) -> Self {
        let mapping = if shared.is_some() {
            Mapping::Pending
        } else {
            Mapping::Impossible("private memory".into())
        };
        Self {
            id,
            len,
            address,
            raw_access,
            shared,
            mapping: Mutex::new(mapping),
            settled: Condvar::new(),
        }
    }

    /// A region of an engine in this very process: visible as it is.
    pub(crate) fn inproc(id: RegionId, memory: Arc<HostRegion>, raw_access: bool) -> Self {
        let region = Self::new(id, memory.len(), memory.address(), raw_access, None);
        region.settle(Ok(Mapped {
            memory,
            region_offset: 0,
        }));
        region
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn settle(&self, outcome: Result<Mapped, String>) {
        *self.mapping.lock().expect("no holder panics") = match outcome {
            Ok(mapped) => Mapping::Ready(mapped),
            Err(reason) => Mapping::Impossible(reason),
        };
        self.settled.notify_all();
    }

    /// Whether a mapping exists or is on its way; the reason when not.
    pub(crate) fn mappable(&self) -> Result<(), String> {
        match &*self.mapping.lock().expect("no holder panics") {
            Mapping::Impossible(reason) => Err(reason.clone()),
            Mapping::Pending | Mapping::Ready(_) => Ok(()),
        }
    }

    /// Whether the mapping covers the whole region (known from the advert while it's pending).
    pub(crate) fn wholly_shared(&self) -> bool {
        match &*self.mapping.lock().expect("no holder panics") {
            Mapping::Impossible(_) => false,
            Mapping::Ready(mapped) => mapped.region_offset == 0 && mapped.memory.len() >= self.len,
            Mapping::Pending => self.shared.is_some_and(|(offset, len)| offset == 0 && len >= self.len),
        }
    }

    /// The mapping, without waiting.
    pub(crate) fn mapped_now(&self) -> Option<Mapped> {
        match &*self.mapping.lock().expect("no holder panics") {
            Mapping::Ready(mapped) => Some(mapped.clone()),
            _ => None,
        }
    }

    /// The mapping; waits while it is being made, as long as the transfer isn't told to stop.
    pub(crate) fn mapped(&self, core: &TransferCore) -> Result<Mapped> {
        let mut mapping = self.mapping.lock().expect("no holder panics");
        loop {
            match &*mapping {
                Mapping::Ready(mapped) => return Ok(mapped.clone()),
                Mapping::Impossible(reason) => {
                    return Err(Error::new(
                        ErrorKind::Region,
                        "shm",
                        format!("region `{}` of the peer can't be mapped: {reason}", self.id),
                    ));
                }
                Mapping::Pending if core.stop.load(Ordering::Relaxed) => {
                    return Err(Error::new(ErrorKind::TransferCancelled, "shm", "stopped while mapping"));
                }
                Mapping::Pending => {
                    let slice = Duration::from_millis(20);
                    mapping = self.settled.wait_timeout(mapping, slice).expect("no holder panics").0;
                }
            }
        }
    }
}

/// One KV cache of the peer.
pub(crate) struct RemoteCache {
    pub(crate) layout: Arc<KvLayout>,
    pub(crate) advert: CacheAdvert,
}

/// The peer's memory as it advertised it, kept up to date by its adverts and withdrawals.
pub(crate) struct Remote {
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    book: Mutex<Book>,
    /// For callers that hold a descriptor or a reference older than the advert it depends on.
    news: Condvar,
}

/// How long an id above all that the peer has advertised is waited for. Its advert is on its way within
/// one trip, or somebody made the id up; the caller may be an engine's loop, so this is no long wait.
/// The unit tests of waiting must not hang on a loaded machine's timing, so theirs is.
const ADVERT_WAIT: Duration = Duration::from_millis(if cfg!(test) { 60_000 } else { 100 });

/// The same for a caller who was handed the descriptor by the peer's application and waits for nothing
/// else: on a loaded machine the thread that reads adverts may not run for a good while.
const PATIENT_WAIT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 10 });

#[derive(Default)]
struct Book {
    regions: BTreeMap<RegionId, Arc<RemoteRegion>>,
    caches: BTreeMap<CacheId, Arc<RemoteCache>>,
    /// The highest id heard of. The owner counts regions and caches with one counter and adverts them
    /// in that order, so a lower id that isn't here was withdrawn: nobody need wait for it.
    newest: u64,
    /// The peer is lost: nothing is entered any more.
    gone: bool,
}

impl Remote {
    pub(crate) fn new(name: String, incarnation: Incarnation) -> Self {
        Self {
            name,
            incarnation,
            book: Mutex::default(),
            news: Condvar::new(),
        }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("no holder panics")
    }

    /// Enters a region; `false` when it is known already or the peer is lost.
    pub(crate) fn add_region(&self, region: Arc<RemoteRegion>) -> bool {
        let mut book = self.book();
        if book.gone || book.regions.contains_key(&region.id) {
            return false;
        }
        book.newest = book.newest.max(region.id.0);
        book.regions.insert(region.id, region);
        self.news.notify_all();
        true
    }

    pub(crate) fn add_cache(&self, advert: CacheAdvert) {
        let mut book = self.book();
        if book.gone {
            return;
        }
        book.newest = book.newest.max(advert.id.0);
        let layout = Arc::new(advert.layout.clone());
        book.caches.insert(advert.id, Arc::new(RemoteCache { layout, advert }));
        self.news.notify_all();
    }

    /// Looks an id up; waits for its advert as long as that can still be on its way.
    fn find<T>(&self, id: u64, wait: Duration, look: impl Fn(&Book) -> Option<Arc<T>>) -> Option<Arc<T>> {
        let on_its_way = |book: &mut Book| book.newest < id && !book.gone;
        let waited = self.news.wait_timeout_while(self.book(), wait, on_its_way);
        look(&waited.expect("no holder panics").0)
    }

    /// Forgets withdrawn regions and caches; running transfers keep what they hold. The caller drops
    /// the regions where unmapping them holds nobody up.
    pub(crate) fn withdraw(&self, regions: &[RegionId], caches: &[CacheId]) -> Vec<Arc<RemoteRegion>> {
        let mut book = self.book();
        for id in caches {
            book.caches.remove(id);
        }
        regions.iter().filter_map(|id| book.regions.remove(id)).collect()
    }

    /// Forgets everything, for good: called when the peer is lost, without waiting for a successor.
    /// The caller drops the regions, as for [`withdraw`](Self::withdraw).
    pub(crate) fn forget_all(&self) -> Vec<Arc<RemoteRegion>> {
        let mut book = self.book();
        let forgotten = std::mem::replace(
            &mut *book,
            Book {
                gone: true,
                ..Book::default()
            },
        );
        self.news.notify_all();
        forgotten.regions.into_values().collect()
    }

    /// A region; waits for its advert if that can still be on its way.
    pub(crate) fn region(&self, id: RegionId) -> Option<Arc<RemoteRegion>> {
        self.find(id.0, ADVERT_WAIT, |book| book.regions.get(&id).cloned())
    }

    /// As [`region`](Self::region), for a caller who can wait out a machine that is busy.
    pub(crate) fn region_patiently(&self, id: RegionId) -> Option<Arc<RemoteRegion>> {
        self.find(id.0, PATIENT_WAIT, |book| book.regions.get(&id).cloned())
    }

    /// Whether the advert of a region can still be on its way.
    pub(crate) fn awaits(&self, id: RegionId) -> bool {
        let book = self.book();
        book.newest < id.0 && !book.gone
    }

    /// A cache, as [`region`](Self::region).
    pub(crate) fn cache(&self, id: CacheId) -> Option<Arc<RemoteCache>> {
        self.find(id.0, ADVERT_WAIT, |book| book.caches.get(&id).cloned())
    }

    /// The regions of a cache, in the order its layout numbers them.
    pub(crate) fn cache_regions(&self, cache: &RemoteCache) -> Result<Vec<Arc<RemoteRegion>>> {
        cache
            .advert
            .regions
            .iter()
            .map(|&id| {
                self.region(id).ok_or_else(|| {
                    Error::new(
                        ErrorKind::Region,
                        "transfer",
                        format!("the peer `{}` withdrew region `{id}`", self.name),
                    )
                })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(id: u64) -> Arc<RemoteRegion> {
        Arc::new(RemoteRegion::new(RegionId(id), 4096, 0, true, None))
    }

    #[test]
    fn an_advert_that_is_late_is_waited_for() {
        let remote = Remote::new("peer".into(), Incarnation::new([1; 16]));
        std::thread::scope(|scope| {
            let found = scope.spawn(|| remote.region(RegionId(2)).map(|region| region.id));
            // Far longer than one trip, and news of something else meanwhile.
            std::thread::sleep(Duration::from_millis(50));
            assert!(remote.add_region(region(1)));
            std::thread::sleep(Duration::from_millis(50));
            assert!(remote.add_region(region(2)));
            assert_eq!(found.join().unwrap(), Some(RegionId(2)));
        });
    }

    #[test]
    fn nothing_is_waited_for_or_entered_once_the_peer_is_lost() {
        let remote = Remote::new("peer".into(), Incarnation::new([1; 16]));
        assert!(remote.add_region(region(7)));
        assert!(!remote.add_region(region(7)), "known already");
        std::thread::scope(|scope| {
            let found = scope.spawn(|| remote.region(RegionId(8)).is_some());
            assert_eq!(remote.forget_all().len(), 1);
            assert!(!found.join().unwrap());
        });
        assert!(!remote.add_region(region(9)));
        assert!(remote.region(RegionId(9)).is_none());
    }
}
