//! What an engine knows of a peer's memory: regions with the ways they can be reached, and caches
//! with their layouts. Everything here was said by the peer, so it is used only to reach into that
//! very peer, and only after the kernel or a mapping confirmed it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pdkv_core::id::{CacheId, Incarnation, RegionId};
use pdkv_core::layout::KvLayout;
use pdkv_core::plan::{Pairing, Selection};
use pdkv_core::wire::{CacheAdvert, DeviceAdvert};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Memory;
use pdkv_device::cuda::Gpu;

use crate::lists::Regions;
use crate::mapping::{Mapped, Mapping};
use crate::transport::Direction;
use crate::view::Views;

/// One region of the peer.
pub(crate) struct RemoteRegion {
    pub(crate) id: RegionId,
    pub(crate) len: u64,
    /// Where it lies in the peer's address space; given to the kernel, never dereferenced here.
    pub(crate) address: u64,
    pub(crate) raw_access: bool,
    /// The stretch (offset, length) the peer says is shared memory.
    pub(crate) shared: Option<(u64, u64)>,
    /// What GPU of another process it is memory of, if it is.
    device: Option<DeviceAdvert>,
    /// Its GPU, when it is memory of one and its engine lives in this process; and whether its allocator may replace it.
    here: Option<(Gpu, bool)>,
    /// What our GPUs see of it.
    pub(crate) views: Views,
    /// What this process sees of it.
    pub(crate) mapping: Mapping,
}

impl RemoteRegion {
    pub(crate) fn new(id: RegionId, len: u64, address: u64, raw_access: bool, shared: Option<(u64, u64)>) -> Self {
        let mapping = if shared.is_some() {
            Mapping::open()
        } else {
            Mapping::impossible("private memory")
        };
        Self {
            id,
            len,
            address,
            raw_access,
            shared,
            device: None,
            here: None,
            views: Views::default(),
            mapping,
        }
    }

    /// A region of an engine in this very process: visible as it is.
    pub(crate) fn inproc(id: RegionId, memory: Memory, raw_access: bool) -> Self {
        let region = Self::new(id, memory.len(), memory.address(), raw_access, None);
        let here = memory.device().map(|region| (region.gpu().clone(), region.may_move()));
        let mapping = Mapping::ready(Mapped {
            memory,
            region_offset: 0,
        });
        Self {
            here,
            mapping,
            ..region
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// A region of a GPU of another process.
    pub(crate) fn lent(id: RegionId, len: u64, raw_access: bool, device: DeviceAdvert) -> Self {
        Self {
            device: Some(device),
            mapping: Mapping::impossible("device memory"),
            ..Self::new(id, len, 0, raw_access, None)
        }
    }

    /// Whether it is memory of a GPU, in whatever process.
    pub(crate) fn is_device(&self) -> bool {
        self.device.is_some() || self.here.is_some()
    }

    /// Whether it is memory of a GPU that its owner's allocator may replace, as far as the owner says.
    pub(crate) fn may_move(&self) -> bool {
        match &self.device {
            Some(device) => device.movable,
            None => self.here.as_ref().is_some_and(|(_, movable)| *movable),
        }
    }

    /// What GPU of another process it is memory of.
    pub(crate) fn device(&self) -> Option<&DeviceAdvert> {
        self.device.as_ref()
    }

    /// Its GPU, when it is memory of one and its engine lives in this process.
    pub(crate) fn gpu_here(&self) -> Option<&Gpu> {
        self.here.as_ref().map(|(gpu, _)| gpu)
    }

    /// Whether the mapping covers the whole region (known from the advert until there is one).
    pub(crate) fn wholly_shared(&self) -> bool {
        match self.mapping.now() {
            Some(mapped) => mapped.region_offset == 0 && mapped.memory.len() >= self.len,
            None if self.mapping.is_impossible() => false,
            None => self.shared.is_some_and(|(offset, len)| offset == 0 && len >= self.len),
        }
    }
}

/// Regions of the peer, in the order that a layout numbers them.
pub(crate) type RegionList = Arc<Regions>;

/// One KV cache of the peer.
pub(crate) struct RemoteCache {
    pub(crate) layout: Arc<KvLayout>,
    pub(crate) advert: CacheAdvert,
    /// Its regions, once they were looked up: so that no transfer looks for each. Every one of them is in the book, too.
    regions: Mutex<Option<RegionList>>,
    /// How all its layers pair with those of the cache of ours that was met last, to read and to write.
    pairings: Mutex<[Option<Paired>; 2]>,
}

/// A layout of ours, and how it pairs with the peer's.
type Paired = (Arc<KvLayout>, Pairing);

impl RemoteCache {
    fn regions(&self) -> MutexGuard<'_, Option<RegionList>> {
        self.regions.lock().expect("no holder panics")
    }

    /// How selected layers pair with those of a cache of ours.
    ///
    /// # Errors
    /// As [`Pairing::new`].
    pub(crate) fn pairing(&self, ours: &Arc<KvLayout>, direction: Direction, selection: &Selection) -> Result<Pairing> {
        let make = || match direction {
            Direction::Read => Pairing::new(&self.layout, ours, selection),
            Direction::Write => Pairing::new(ours, &self.layout, selection),
        };
        if *selection != Selection::layers(0, ours.num_layers()) {
            return make();
        }
        let pairings = || self.pairings.lock().expect("no holder panics");
        if let Some((known, pairing)) = &pairings()[direction as usize]
            && Arc::ptr_eq(known, ours)
        {
            return Ok(pairing.clone());
        }
        let pairing = make()?;
        pairings()[direction as usize] = Some((Arc::clone(ours), pairing.clone()));
        Ok(pairing)
    }
}

/// The peer's memory as it advertised it, kept up to date by its adverts and withdrawals.
pub(crate) struct Remote {
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    book: Mutex<Book>,
    /// For callers that hold a descriptor or a reference older than the advert it depends on.
    news: Condvar,
}

/// How long a peer may take to say whether it has advertised all it has. One that is well says so within
/// a round trip; only a machine that is very busy needs long.
pub(crate) const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// The same where the caller may be an engine's loop.
pub(crate) const BRIEF_WAIT: Duration = Duration::from_millis(500);
/// The same for a peer that did not answer before: it is not to hold up every caller in turn.
const AGAIN_WAIT: Duration = Duration::from_millis(100);
/// What an engine's loop waits in vain for one peer within this time is bounded by [`BRIEF_WAIT`] in all: whoever makes ids
/// up, or answers late, costs it that and not as much again for each request.
const SPELL: Duration = Duration::from_secs(10);
/// Set in the numbers of our questions, so that they are told from those of heartbeats.
const QUESTION: u64 = 1 << 63;

/// How long was waited for nothing in this spell.
#[derive(Default)]
struct InVain {
    since: Option<Instant>,
    waited: Duration,
}

impl InVain {
    /// How much more may be waited at this moment.
    fn left(&self, now: Instant) -> Duration {
        match self.since {
            Some(since) if now.saturating_duration_since(since) < SPELL => BRIEF_WAIT.saturating_sub(self.waited),
            _ => BRIEF_WAIT,
        }
    }

    /// Another wait, begun at `start` and over now, was in vain.
    fn add(&mut self, start: Instant, now: Instant) {
        if self.left(now) == BRIEF_WAIT {
            *self = Self {
                since: Some(start),
                waited: Duration::ZERO,
            };
        }
        self.waited += now.saturating_duration_since(start);
    }
}

#[derive(Default)]
struct Book {
    regions: BTreeMap<RegionId, Arc<RemoteRegion>>,
    caches: BTreeMap<CacheId, Arc<RemoteCache>>,
    /// The highest id heard of. The owner counts regions and caches with one counter and adverts them
    /// in that order, so a lower id that isn't here was withdrawn: nobody need wait for it.
    newest: u64,
    /// Questions put to the peer, and the last of them that it has answered: what it had advertised before
    /// that answer is in here.
    asked: u64,
    answered: u64,
    /// It left a question without an answer.
    silent: bool,
    /// What engines' loops have waited in vain.
    in_vain: InVain,
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
        let cache = RemoteCache {
            layout,
            advert,
            regions: Mutex::default(),
            pairings: Mutex::default(),
        };
        book.caches.insert(cache.advert.id, Arc::new(cache));
        self.news.notify_all();
    }

    /// Looks an id up. One above all that the peer has advertised was made up, or its advert is on its way:
    /// then `ask` sends the peer a ping of this number, whose answer comes after that advert. Only the peer's answer
    /// makes it `None`: an id that could not be asked for is an error, for it may well be good.
    fn find<T>(
        &self,
        id: u64,
        mut wait: Duration,
        ask: impl FnOnce(u64) -> Result<()>,
        look: impl Fn(&Book) -> Option<Arc<T>>,
    ) -> Result<Option<Arc<T>>> {
        let (start, brief) = (Instant::now(), wait <= BRIEF_WAIT);
        let question = {
            let mut book = self.book();
            if book.newest >= id || book.gone {
                return Ok(look(&book));
            }
            if brief {
                wait = wait.min(book.in_vain.left(start));
            }
            if wait.is_zero() {
                return Err(self.unheard());
            }
            book.asked += 1;
            book.asked
        };
        ask(QUESTION | question)?;
        let book = self.book();
        let wait = if book.silent { wait.min(AGAIN_WAIT) } else { wait };
        let open = |book: &mut Book| book.newest < id && book.answered < question && !book.gone;
        let (mut book, waited) = self
            .news
            .wait_timeout_while(book, wait, open)
            .expect("no holder panics");
        let found = look(&book);
        if brief && found.is_none() {
            book.in_vain.add(start, Instant::now());
        }
        if waited.timed_out() {
            book.silent = true;
            return Err(self.unheard());
        }
        Ok(found)
    }

    fn unheard(&self) -> Error {
        let text = format!("the peer `{}` did not say in time what it has registered", self.name);
        Error::new(ErrorKind::TransferTimeout, "transfer", text)
            .with_hint("it may be busy, stopped or cut off; try again when it answers")
    }

    /// The peer has answered a ping.
    pub(crate) fn answered(&self, number: u64) {
        if number & QUESTION != 0 {
            let mut book = self.book();
            book.answered = book.answered.max(number & !QUESTION).min(book.asked);
            book.silent = false;
            self.news.notify_all();
        }
    }

    /// Forgets withdrawn regions and caches; running transfers keep what they hold. The caller drops
    /// the regions where unmapping them holds nobody up.
    pub(crate) fn withdraw(&self, regions: &[RegionId], caches: &[CacheId]) -> Vec<Arc<RemoteRegion>> {
        let mut book = self.book();
        // All regions of the lists that are dropped here are in the book still, so none of them ends.
        for id in caches {
            drop(book.caches.remove(id).map(|cache| cache.regions().take()));
        }
        if !regions.is_empty() {
            book.caches.values().for_each(|cache| drop(cache.regions().take()));
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
        // Whoever still looks at a cache is not to be the last to hold its regions.
        forgotten.caches.values().for_each(|cache| drop(cache.regions().take()));
        forgotten.regions.into_values().collect()
    }

    /// A region, or `None` when the peer has none of this id. `ask` puts a question to the peer, whose answer is
    /// waited for, for `wait` at most.
    ///
    /// # Errors
    /// `TransferTimeout` when none came, and what `ask` says.
    pub(crate) fn region(
        &self,
        id: RegionId,
        wait: Duration,
        ask: impl FnOnce(u64) -> Result<()>,
    ) -> Result<Option<Arc<RemoteRegion>>> {
        self.find(id.0, wait, ask, |book| book.regions.get(&id).cloned())
    }

    /// A region that its owner has named to us: its advert is on its way by all means. Waits a moment for it.
    pub(crate) fn region_to_come(&self, id: RegionId) -> Option<Arc<RemoteRegion>> {
        let on_its_way = |book: &mut Book| book.newest < id.0 && !book.gone;
        let waited = self.news.wait_timeout_while(self.book(), AGAIN_WAIT, on_its_way);
        waited.expect("no holder panics").0.regions.get(&id).cloned()
    }

    /// Whether the advert of a region can still be on its way.
    pub(crate) fn awaits(&self, id: RegionId) -> bool {
        let book = self.book();
        book.newest < id.0 && !book.gone
    }

    /// A cache, as [`region`](Self::region).
    pub(crate) fn cache(
        &self,
        id: CacheId,
        wait: Duration,
        ask: impl FnOnce(u64) -> Result<()>,
    ) -> Result<Option<Arc<RemoteCache>>> {
        self.find(id.0, wait, ask, |book| book.caches.get(&id).cloned())
    }

    /// Whether [`cache`](Self::cache) answers without asking the peer.
    pub(crate) fn is_settled(&self, id: CacheId) -> bool {
        let book = self.book();
        book.newest >= id.0 || book.gone
    }

    /// The regions of a cache, in the order its layout numbers them. They are in its own advert or an earlier one.
    pub(crate) fn cache_regions(&self, cache: &Arc<RemoteCache>) -> Result<RegionList> {
        // Under this lock regions are withdrawn.
        let book = self.book();
        if let Some(known) = &*cache.regions() {
            return Ok(Arc::clone(known));
        }
        let find = |id| {
            book.regions.get(id).cloned().ok_or_else(|| {
                let text = format!("the peer `{}` withdrew region `{id}`", self.name);
                Error::new(ErrorKind::Region, "transfer", text)
            })
        };
        let found: Vec<_> = cache.advert.regions.iter().map(find).collect::<Result<_>>()?;
        let found = Arc::new(Regions::from(found));
        // One that was withdrawn itself would keep regions that nobody takes out of it.
        let known = book.caches.get(&cache.advert.id);
        if known.is_some_and(|known| Arc::ptr_eq(known, cache)) {
            *cache.regions() = Some(Arc::clone(&found));
        }
        Ok(found)
    }
}

#[cfg(test)]
#[path = "remote_tests.rs"]
mod tests;
