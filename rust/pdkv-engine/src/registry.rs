//! The memory this engine offers: regions and caches with ids that are never used twice.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, RwLock};

use pdkv_core::id::{CacheId, PeerKey, RegionId};
use pdkv_core::layout::KvLayout;
use pdkv_core::shard::Shard;
use pdkv_core::wire::{CacheAdvert, DeviceAdvert, RegionAdvert, SharedExtent};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::Witnesses;
use pdkv_device::{HostRegion, Memory};

use crate::fence::Fences;
use crate::lists::Memories;
use crate::view::lasts;

/// Memory that is about to be registered, and what peers are to be told of it: found out before anybody's lock is taken, for
/// the driver may be slow.
pub(crate) struct Offered {
    pub(crate) memory: Memory,
    device: Option<DeviceAdvert>,
}

impl From<Memory> for Offered {
    fn from(memory: Memory) -> Self {
        let device = memory.device().map(|region| DeviceAdvert {
            uuid: region.gpu().uuid(),
            // What may pass is found out by whoever asks.
            sealed: match region.share_from(0, 1) {
                Err(error) if lasts(&error) => error.message().to_owned(),
                _ => String::new(),
            },
            movable: region.may_move(),
        });
        Self { memory, device }
    }
}

/// One registered region.
pub(crate) struct LocalRegion {
    pub(crate) id: RegionId,
    pub(crate) name: String,
    pub(crate) memory: Memory,
    pub(crate) raw_access: bool,
    /// What peers are told when it is memory of a GPU.
    device: Option<DeviceAdvert>,
    /// The only peer that knows of it, when it isn't for all.
    only: Option<PeerKey>,
}

/// One registered KV cache.
pub(crate) struct LocalCache {
    pub(crate) id: CacheId,
    pub(crate) layout: Arc<KvLayout>,
    pub(crate) regions: Vec<RegionId>,
    pub(crate) memory: Arc<Memories>,
    pub(crate) shard: Shard,
    pub(crate) model: String,
    pub(crate) fingerprint: [u8; 32],
    pub(crate) movable: Movable,
}

/// What tells whether an allocator has put other memory of a GPU where a cache was registered.
#[derive(Default)]
pub(crate) struct Movable {
    witnesses: Witnesses,
    /// What was found; it does not come back.
    moved: OnceLock<Error>,
    /// Somebody is asking the driver beside claims.
    looking: AtomicBool,
    /// Fences that are to be answered once the driver has been asked.
    pub(crate) fences: Fences,
}

impl From<Witnesses> for Movable {
    fn from(witnesses: Witnesses) -> Self {
        Self {
            witnesses,
            ..Self::default()
        }
    }
}

impl Movable {
    /// Whether an allocator of somebody else's has it.
    pub(crate) fn may_move(&self) -> bool {
        !self.witnesses.is_empty()
    }

    /// What is known without asking the driver.
    pub(crate) fn moved(&self) -> Option<&Error> {
        self.moved.get()
    }

    fn ask(&self, look: impl FnOnce(&Witnesses) -> Result<()>) -> Result<()> {
        if let Some(error) = self.moved() {
            return Err(error.clone());
        }
        let found = look(&self.witnesses);
        if let Err(error) = &found
            && error.kind() == ErrorKind::Region
        {
            // Somebody else may have found it, too.
            let _ = self.moved.set(error.clone());
        }
        found
    }
}

/// A look at a cache beside its claims: one at a time, however many come while the driver is slow.
pub(crate) struct Looking(Arc<LocalCache>);

impl Looking {
    /// `None` while somebody else looks.
    pub(crate) fn begin(cache: &Arc<LocalCache>) -> Option<Self> {
        let others = cache.movable.looking.swap(true, Ordering::AcqRel);
        (!others).then(|| Self(Arc::clone(cache)))
    }

    pub(crate) fn cache(&self) -> &LocalCache {
        &self.0
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        self.0.movable.looking.store(false, Ordering::Release);
    }
}

#[derive(Default)]
pub(crate) struct Registry {
    next: AtomicU64,
    /// Whether there has been a cache whose memory an allocator may move.
    movable: AtomicBool,
    book: RwLock<Book>,
}

#[derive(Default)]
struct Book {
    regions: BTreeMap<RegionId, Arc<LocalRegion>>,
    caches: BTreeMap<CacheId, Arc<LocalCache>>,
}

impl Registry {
    fn id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn add_region(&self, name: String, offered: Offered, raw_access: bool) -> Arc<LocalRegion> {
        self.enter(name, offered, raw_access, None)
    }

    /// A region for raw access by one peer.
    pub(crate) fn add_private(&self, peer: PeerKey, name: String, memory: Arc<HostRegion>) -> Arc<LocalRegion> {
        self.enter(name, Memory::from(memory).into(), true, Some(peer))
    }

    fn enter(&self, name: String, offered: Offered, raw_access: bool, only: Option<PeerKey>) -> Arc<LocalRegion> {
        let Offered { memory, device } = offered;
        let region = Arc::new(LocalRegion {
            id: RegionId(self.id()),
            name,
            memory,
            device,
            raw_access,
            only,
        });
        self.book
            .write()
            .expect("no holder panics")
            .regions
            .insert(region.id, Arc::clone(&region));
        region
    }

    pub(crate) fn add_cache(&self, make: impl FnOnce(CacheId) -> LocalCache) -> Arc<LocalCache> {
        let cache = Arc::new(make(CacheId(self.id())));
        if cache.movable.may_move() {
            self.movable.store(true, Ordering::Release);
        }
        self.book
            .write()
            .expect("no holder panics")
            .caches
            .insert(cache.id, Arc::clone(&cache));
        cache
    }

    /// Forgets a region; `false` when it was forgotten before.
    pub(crate) fn remove_region(&self, id: RegionId) -> bool {
        self.book
            .write()
            .expect("no holder panics")
            .regions
            .remove(&id)
            .is_some()
    }

    /// Forgets a cache and its regions; `None` when it was forgotten before.
    pub(crate) fn remove_cache(&self, id: CacheId) -> Option<Arc<LocalCache>> {
        let mut book = self.book.write().expect("no holder panics");
        let cache = book.caches.remove(&id)?;
        for region in &cache.regions {
            book.regions.remove(region);
        }
        Some(cache)
    }

    /// Forgets everything.
    pub(crate) fn clear(&self) {
        let dropped = std::mem::take(&mut *self.book.write().expect("no holder panics"));
        // Not under the lock: whoever lent the memory may hear of it, and ask for something here.
        drop(dropped);
    }

    pub(crate) fn region(&self, id: RegionId) -> Result<Arc<LocalRegion>> {
        self.book
            .read()
            .expect("no holder panics")
            .regions
            .get(&id)
            .cloned()
            .ok_or_else(|| unknown("region", id.0))
    }

    pub(crate) fn cache(&self, id: CacheId) -> Result<Arc<LocalCache>> {
        self.book
            .read()
            .expect("no holder panics")
            .caches
            .get(&id)
            .cloned()
            .ok_or_else(|| unknown("cache", id.0))
    }

    /// Whether the memory of any cache may be another than was registered.
    pub(crate) fn may_move(&self) -> bool {
        self.movable.load(Ordering::Acquire)
    }

    /// Whether any region is this memory of the host.
    pub(crate) fn lends(&self, memory: &Arc<HostRegion>) -> bool {
        self.holds(&Memory::Host(Arc::clone(memory)))
    }

    /// Whether any region is this memory.
    pub(crate) fn holds(&self, memory: &Memory) -> bool {
        let book = self.book.read().expect("no holder panics");
        let kept = book.caches.values().flat_map(|cache| cache.memory.iter());
        let mut regions = book.regions.values().map(|region| &region.memory).chain(kept);
        regions.any(|held| held.is(memory))
    }

    /// A region as this peer may know it.
    pub(crate) fn region_for(&self, peer: PeerKey, id: RegionId) -> Result<Arc<LocalRegion>> {
        let region = self.region(id)?;
        if region.only.is_some_and(|only| only != peer) {
            // Nothing that it has been told of, so nothing that there is.
            return Err(unknown("region", id.0));
        }
        Ok(region)
    }

    /// The memory of a region that this peer may read and write as it likes.
    pub(crate) fn raw_region(&self, peer: PeerKey, id: RegionId) -> Result<Memory> {
        let region = self.region_for(peer, id)?;
        if !region.raw_access {
            return Err(Error::new(
                ErrorKind::Region,
                "raw access",
                format!("region `{id}` holds KV blocks"),
            )
            .with_hint("KV blocks move by reference: export them and let the peer pull"));
        }
        Ok(region.memory.clone())
    }

    /// Regions that are for one peer alone.
    #[cfg(test)]
    pub(crate) fn private(&self) -> usize {
        let book = self.book.read().expect("no holder panics");
        book.regions.values().filter(|region| region.only.is_some()).count()
    }

    /// All memory that is registered for everybody.
    pub(crate) fn memories(&self) -> Vec<Memory> {
        let book = self.book.read().expect("no holder panics");
        let regions = book.regions.values().filter(|region| region.only.is_none());
        regions.map(|region| region.memory.clone()).collect()
    }

    /// Everything, as it goes into a hello.
    pub(crate) fn adverts(&self) -> (Vec<RegionAdvert>, Vec<CacheAdvert>) {
        let book = self.book.read().expect("no holder panics");
        (
            book.regions
                .values()
                .filter(|r| r.only.is_none())
                .map(|r| r.advert())
                .collect(),
            book.caches.values().map(|c| c.advert()).collect(),
        )
    }
}

impl LocalRegion {
    /// Whether peers on this host can map all of it.
    pub(crate) fn is_shared(&self) -> bool {
        if let Some(device) = &self.device {
            return device.sealed.is_empty();
        }
        let part = self.memory.shared();
        part.is_some_and(|part| part.region_offset == 0 && part.fd_len >= self.memory.len())
    }

    pub(crate) fn advert(&self) -> RegionAdvert {
        let shared = self.memory.shared();
        RegionAdvert {
            id: self.id,
            len: self.memory.len(),
            base_address: match &self.device {
                Some(_) => RegionAdvert::NOWHERE,
                None => self.memory.address(),
            },
            shared: shared.map(|part| SharedExtent {
                offset: part.region_offset,
                len: part.fd_len,
            }),
            raw_access: self.raw_access,
            name: self.name.clone(),
            device: self.device.clone(),
        }
    }
}

impl LocalCache {
    /// Whether its memory is the one that was registered; peers map what was there then. Asks the driver, which may be slow.
    ///
    /// # Errors
    /// `Region` when an allocator has put other memory there, `Device` when the driver fails.
    pub(crate) fn still_there(&self) -> Result<()> {
        self.movable.ask(Witnesses::still_there)
    }

    /// The same by a look that costs no more for much memory than for little.
    ///
    /// # Errors
    /// As [`still_there`](Self::still_there).
    pub(crate) fn glance(&self) -> Result<()> {
        self.movable.ask(Witnesses::glance)
    }

    pub(crate) fn advert(&self) -> CacheAdvert {
        CacheAdvert {
            id: self.id,
            layout: (*self.layout).clone(),
            regions: self.regions.clone(),
            shard: self.shard.clone(),
            fingerprint: self.fingerprint,
            model: self.model.clone(),
        }
    }
}

fn unknown(what: &str, id: u64) -> Error {
    Error::new(ErrorKind::Region, "look up", format!("{what} `{id}` is not registered"))
        .with_hint("it was deregistered, or the id belongs to another engine")
}
