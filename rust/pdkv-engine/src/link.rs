//! Our way into one peer: the transports that reach it and what it advertised, shared by all handles
//! on the peer and by the progress thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use pdkv_core::id::{CacheId, PeerKey, RegionId};
use pdkv_core::wire::{Advertise, Message, Ping, RegionAdvert};
use pdkv_core::{Error, ErrorKind, Result};

use crate::dial::StreamDial;
use crate::door::LocalDoor;
use crate::mapping::map_open;
use crate::raw_fence::RawFence;
use crate::remote::{ANSWER_WAIT, BRIEF_WAIT, Remote, RemoteCache, RemoteRegion};
use crate::shared::Shared;
use crate::transport::Way;
use crate::transport::gpu::GpuLink;
use crate::transport::onesided::OneSided;

/// One connected peer, seen from the side that connected.
pub(crate) struct PeerLink {
    pub(crate) key: PeerKey,
    pub(crate) address: String,
    pub(crate) remote: Remote,
    pub(crate) ways: Vec<Way>,
    /// The one-sided links once more, for raw operations that run in the caller.
    pub(crate) direct: Vec<Arc<OneSided>>,
    /// The way of GPUs once more, to have memory mapped before it is wanted.
    pub(crate) gpu: Option<Arc<GpuLink>>,
    /// Where raw transfers with memory that may move come by after their last byte.
    pub(crate) fence: Arc<RawFence>,
    /// How to open a pipe to it; `None` when its release has none.
    pub(crate) pipes: Option<StreamDial>,
    pub(crate) door: Option<LocalDoor>,
    /// The peer's engine, when it lives in this process.
    pub(crate) inproc: Option<Weak<Shared>>,
    pub(crate) lost: AtomicBool,
    pub(crate) cause: Mutex<Option<Error>>,
}

impl PeerLink {
    pub(crate) fn check_alive(&self) -> Result<()> {
        if !self.lost.load(Ordering::Acquire) {
            return Ok(());
        }
        let cause = self
            .cause
            .lock()
            .expect("no holder panics")
            .as_ref()
            .map(|error| error.message().to_owned());
        Err(Error::new(
            ErrorKind::PeerLost,
            "peer",
            format!("the peer `{}` is gone: {}", self.remote.name, cause.unwrap_or_default()),
        )
        .with_hint("connect() again; a restarted engine is another incarnation"))
    }

    /// A region of the peer; `None` when it has none of this id. What was registered this moment is waited for, for
    /// a round trip and no longer than `limit`.
    ///
    /// # Errors
    /// `PeerLost`; `TransferTimeout` when the peer doesn't answer.
    pub(crate) fn region(
        &self,
        shared: &Arc<Shared>,
        id: RegionId,
        limit: Duration,
    ) -> Result<Option<Arc<RemoteRegion>>> {
        let found = self
            .remote
            .region(id, limit.min(ANSWER_WAIT), |number| self.ask(shared, number))?;
        found.map_or_else(|| self.check_alive().map(|()| None), |region| Ok(Some(region)))
    }

    /// A cache, as [`region`](Self::region). Whoever asks may be an LLM engine's loop, and the id a stranger's word: a
    /// peer is waited for half a second at most, and in ten seconds no more than that for all ids that it has not.
    pub(crate) fn cache(&self, shared: &Arc<Shared>, id: CacheId, limit: Duration) -> Result<Option<Arc<RemoteCache>>> {
        let found = self
            .remote
            .cache(id, limit.min(BRIEF_WAIT), |number| self.ask(shared, number))?;
        found.map_or_else(|| self.check_alive().map(|()| None), |cache| Ok(Some(cache)))
    }

    /// Waits, for `limit` at most, until the peer has said whether it has a cache; without any time it looks only. Gives
    /// whether [`cache`](Self::cache) waits for nobody now.
    ///
    /// # Errors
    /// `ReferenceUnknown` when the peer says that it has none, `TransferTimeout` when it says nothing, `PeerLost`.
    pub(crate) fn await_cache(&self, shared: &Arc<Shared>, id: CacheId, limit: Duration) -> Result<bool> {
        self.check_alive()?;
        if self.remote.is_settled(id) || limit.is_zero() {
            return Ok(self.remote.is_settled(id));
        }
        let limit = limit.min(ANSWER_WAIT);
        match self.remote.cache(id, limit, |number| self.ask(shared, number))? {
            Some(_) => Ok(true),
            None => self.check_alive().and_then(|()| Err(self.no_cache(id))),
        }
    }

    /// What to say of a cache that the peer has not.
    pub(crate) fn no_cache(&self, id: CacheId) -> Error {
        let text = format!("the peer `{}` has no cache `{id}`", self.remote.name);
        Error::new(ErrorKind::ReferenceUnknown, "transfer", text)
            .with_hint("the cache was deregistered, or the reference was altered")
    }

    /// Sends a ping, whose answer comes after whatever the peer has said before it hears it. What came in already is
    /// heard at once, here: on a busy machine the thread that reads may not run for a good while.
    fn ask(&self, shared: &Arc<Shared>, sequence: u64) -> Result<()> {
        let reader = match shared.lock().peers.get_mut(&self.key) {
            Some(entry) => {
                entry.send(&Message::Ping(Ping { sequence }))?;
                Arc::clone(&entry.reader)
            }
            // Lost this moment; nothing of it is known any more.
            None => return Ok(()),
        };
        reader.pump_until(shared, Duration::ZERO, || true);
        Ok(())
    }

    /// The peer is lost: its mappings go now, without waiting for a successor. The caller drops them.
    pub(crate) fn die(&self, error: &Error) -> Vec<Arc<RemoteRegion>> {
        self.cause
            .lock()
            .expect("no holder panics")
            .get_or_insert_with(|| error.clone());
        self.lost.store(true, Ordering::Release);
        if let Some(door) = &self.door {
            door.shut();
        }
        self.fence.shut_down();
        for way in &self.ways {
            if let Ok(link) = &way.link {
                link.shut_down();
            }
        }
        self.remote.forget_all()
    }

    /// Takes in newly registered memory of the peer; shared parts are mapped in the background.
    pub(crate) fn learn(self: &Arc<Self>, shared: &Arc<Shared>, advertise: &Advertise) {
        let unmapped = self.note(advertise);
        self.map_later(shared, unmapped);
    }

    /// Has these regions mapped in the background. What isn't is mapped by whoever wants it.
    pub(crate) fn map_later(self: &Arc<Self>, shared: &Arc<Shared>, regions: Vec<Arc<RemoteRegion>>) {
        if !regions.is_empty() {
            let link = Arc::clone(self);
            // Without a thread now there may be one then.
            let _ = shared.movers.task(move || link.map(&regions, &|| false));
        }
    }

    /// Enters the adverts; returns the regions that wait to be mapped.
    pub(crate) fn note(&self, advertise: &Advertise) -> Vec<Arc<RemoteRegion>> {
        let mut unmapped = Vec::new();
        for advert in &advertise.regions {
            let region = Arc::new(self.remote_region(advert));
            let pending = self.inproc.is_none() && (advert.shared.is_some() || advert.device.is_some());
            if let Some(gpu) = self.gpu.as_ref().filter(|_| region.is_device()) {
                gpu.hear();
            }
            if self.remote.add_region(Arc::clone(&region)) && pending {
                unmapped.push(region);
            }
        }
        for cache in &advertise.caches {
            self.remote.add_cache(cache.clone());
        }
        unmapped
    }

    fn remote_region(&self, advert: &RegionAdvert) -> RemoteRegion {
        if let Some(engine) = &self.inproc {
            let local = engine
                .upgrade()
                .and_then(|engine| engine.registry.region(advert.id).ok());
            if let Some(local) = local {
                return RemoteRegion::inproc(advert.id, local.memory.clone(), advert.raw_access);
            }
        }
        if let Some(device) = advert.device.clone() {
            return RemoteRegion::lent(advert.id, advert.len, advert.raw_access, device);
        }
        // A neighbour that has withdrawn the region since is not asked to map it.
        let shared = advert.shared.filter(|_| self.inproc.is_none());
        let shared = shared.map(|extent| (extent.offset, extent.len));
        RemoteRegion::new(advert.id, advert.len, advert.base_address, advert.raw_access, shared)
    }

    /// Maps these regions for our processors and GPUs, unless told to stop. Blocks on the peer's local socket.
    pub(crate) fn map(&self, regions: &[Arc<RemoteRegion>], stopped: &dyn Fn() -> bool) {
        let (lent, regions): (Vec<_>, Vec<_>) = regions.iter().cloned().partition(|region| region.is_device());
        map_open(self.door.as_ref(), &regions, stopped);
        if let Some(gpu) = &self.gpu {
            gpu.prefetch(&lent, stopped);
        }
    }
}
