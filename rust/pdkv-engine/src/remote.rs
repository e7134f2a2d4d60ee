//! What an engine knows of a peer's memory: regions with the ways they can be reached, and caches
//! with their layouts. Everything here was said by the peer, so it is used only to reach into that
//! very peer, and only after the kernel or a mapping confirmed it.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, RwLock};
use std::time::{Duration, Instant};

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
    book: RwLock<Book>,
    /// Callers that hold a descriptor or a reference older than the advert it depends on.
    news: (Mutex<()>, Condvar),
}

/// How long an id that the peer hasn't advertised yet is waited for: adverts are on their way within
/// one trip, and a caller in an engine's loop must not be held by an id that somebody made up.
const ADVERT_WAIT: Duration = Duration::from_millis(20);

#[derive(Default)]
struct Book {
    regions: BTreeMap<RegionId, Arc<RemoteRegion>>,
    caches: BTreeMap<CacheId, Arc<RemoteCache>>,
}

impl Remote {
    pub(crate) fn new(name: String, incarnation: Incarnation) -> Self {
        Self {
            name,
            incarnation,
            book: RwLock::default(),
            news: Default::default(),
        }
    }

    pub(crate) fn add_region(&self, region: Arc<RemoteRegion>) {
        self.book
            .write()
            .expect("no holder panics")
            .regions
            .insert(region.id, region);
        self.news.1.notify_all();
    }

    pub(crate) fn add_cache(&self, advert: CacheAdvert) {
        let cache = RemoteCache {
            layout: Arc::new(advert.layout.clone()),
            advert,
        };
        self.book
            .write()
            .expect("no holder panics")
            .caches
            .insert(cache.advert.id, Arc::new(cache));
        self.news.1.notify_all();
    }

    /// Looks something up, and once more when news came, for [`ADVERT_WAIT`] at most.
    pub(crate) fn find<T>(&self, look: impl Fn(&Self) -> Option<T>) -> Option<T> {
        if let Some(found) = look(self) {
            return Some(found);
        }
        let deadline = Instant::now() + ADVERT_WAIT;
        let mut guard = self.news.0.lock().expect("no holder panics");
        loop {
            let left = deadline
                .saturating_duration_since(Instant::now())
                .min(Duration::from_millis(1));
            guard = self.news.1.wait_timeout(guard, left).expect("no holder panics").0;
            let found = look(self);
            if found.is_some() || left.is_zero() {
                return found;
            }
        }
    }

    /// Forgets withdrawn regions and caches; running transfers keep what they hold.
    pub(crate) fn withdraw(&self, regions: &[RegionId], caches: &[CacheId]) {
        let mut book = self.book.write().expect("no holder panics");
        for id in regions {
            book.regions.remove(id);
        }
        for id in caches {
            book.caches.remove(id);
        }
    }

    /// Drops every mapping of the peer's memory: called when the peer is lost, without waiting for
    /// a successor.
    pub(crate) fn forget_all(&self) {
        *self.book.write().expect("no holder panics") = Book::default();
    }

    pub(crate) fn region(&self, id: RegionId) -> Option<Arc<RemoteRegion>> {
        self.book.read().expect("no holder panics").regions.get(&id).cloned()
    }

    pub(crate) fn cache(&self, id: CacheId) -> Option<Arc<RemoteCache>> {
        self.book.read().expect("no holder panics").caches.get(&id).cloned()
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
                        "pull",
                        format!("the peer `{}` withdrew region `{id}`", self.name),
                    )
                })
            })
            .collect()
    }
}
