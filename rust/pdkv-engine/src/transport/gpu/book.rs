//! What one engine keeps of GPUs: their desks, and its own host memory as far as it is registered with the driver.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::{Gpu, HostAccess, Reach};
use pdkv_device::{HostRegion, Memory};

use super::desk::Desk;
use super::opening::Openings;
use crate::registry::Registry;
use crate::view::{AGAIN, lasts};

/// By GPU and by the region itself, which its registration keeps where it is.
type Key = (u32, usize);

/// GPUs that this engine uses.
#[derive(Default)]
pub(crate) struct Gpus {
    book: Mutex<Book>,
    pub(super) openings: Openings,
}

#[derive(Default)]
struct Book {
    desks: BTreeMap<u32, Arc<Desk>>,
    /// Registered memory of the host.
    host: HashMap<Key, Known>,
    closed: bool,
}

/// What is known of memory of the host.
enum Known {
    Reached(Arc<HostAccess>),
    /// Never, and why.
    Out(String),
    /// Not until then.
    NotNow(Error, Instant),
}

impl Known {
    fn of(access: &Result<Arc<HostAccess>>) -> Self {
        match access {
            Ok(access) => Self::Reached(Arc::clone(access)),
            Err(error) if lasts(error) => Self::Out(error.message().to_owned()),
            Err(error) => Self::NotNow(error.clone(), Instant::now() + AGAIN),
        }
    }

    /// Whether it is as if nobody had tried.
    fn is_over(&self) -> bool {
        matches!(self, Self::NotNow(_, until) if *until <= Instant::now())
    }

    /// The memory, or why not.
    fn get(&self) -> Result<Reach> {
        match self {
            Self::Reached(access) => Ok(Reach::Host(Arc::clone(access))),
            Self::Out(reason) => Err(Error::new(ErrorKind::Unsupported, "cuda", reason.clone())),
            Self::NotNow(error, _) => Err(error.clone()),
        }
    }
}

fn key(gpu: &Gpu, region: &Arc<HostRegion>) -> Key {
    (gpu.ordinal(), Arc::as_ptr(region) as usize)
}

impl Gpus {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("no holder panics")
    }

    /// The desk of a GPU, opened at first use.
    ///
    /// # Errors
    /// `Capacity` when the system gives no thread, `Closed`.
    pub(super) fn desk(&self, gpu: &Gpu) -> Result<Arc<Desk>> {
        let mut book = self.book();
        if book.closed {
            return Err(Error::new(ErrorKind::Closed, "cuda", "the engine was closed"));
        }
        if let Some(desk) = book.desks.get(&gpu.ordinal()) {
            return Ok(Arc::clone(desk));
        }
        let desk = Desk::of(gpu)?;
        book.desks.insert(gpu.ordinal(), Arc::clone(&desk));
        Ok(desk)
    }

    /// The desk of a GPU, if it is open.
    pub(super) fn open_desk(&self, gpu: &Gpu) -> Option<Arc<Desk>> {
        self.book().desks.get(&gpu.ordinal()).cloned()
    }

    /// The desks that are open.
    pub(super) fn desks(&self) -> Vec<Arc<Desk>> {
        self.book().desks.values().cloned().collect()
    }

    /// Opens the desks of memory that was just registered, so that no transfer waits for kernels to be compiled, and has measured what later ones
    /// go by while the GPU has little to do. Waits for neither.
    pub(crate) fn warm<'a>(&self, memory: impl IntoIterator<Item = &'a Memory>) {
        for region in memory.into_iter().filter_map(Memory::device) {
            // Without a thread now, the first transfer tries again.
            if let Ok(desk) = self.desk(region.gpu()) {
                desk.measure();
            }
        }
    }

    /// Our memory as the GPU reaches it. Blocks while host memory is registered with the driver.
    ///
    /// # Errors
    /// Why it can't be reached.
    pub(super) fn reach(&self, gpu: &Gpu, registry: &Registry, memory: &Memory) -> Result<Reach> {
        let region = match memory {
            Memory::Device(region) => {
                region.reached_by(gpu)?;
                return Ok(Reach::Device(Arc::clone(region)));
            }
            Memory::Host(region) => region,
        };
        let key = key(gpu, region);
        if let Some(known) = self.book().host.get(&key).filter(|known| !known.is_over()) {
            return known.get();
        }
        let access = HostAccess::of(gpu, region);
        let mut book = self.book();
        // Who was sooner and found it reached is right.
        if !book.closed && !matches!(book.host.get(&key), Some(Known::Reached(_))) {
            book.host.insert(key, Known::of(&access));
        }
        drop(book);
        // It may have been deregistered meanwhile, or is no region of ours: then nobody else would drop this.
        if !registry.lends(region) {
            self.forget(memory);
        }
        access.map(Reach::Host)
    }

    /// The same as far as it is known, without registering anything.
    pub(super) fn reached(&self, gpu: &Gpu, memory: &Memory) -> Option<Reach> {
        match memory {
            Memory::Device(region) => {
                region.reached_by(gpu).ok()?;
                Some(Reach::Device(Arc::clone(region)))
            }
            Memory::Host(region) => {
                let book = self.book();
                let known = book.host.get(&key(gpu, region)).filter(|known| !known.is_over());
                known?.get().ok()
            }
        }
    }

    /// Whether [`reach`](Self::reach) would not wait for the driver.
    pub(super) fn reaches_now(&self, gpu: &Gpu, memory: &Memory) -> bool {
        match memory {
            Memory::Device(_) => true,
            Memory::Host(region) => {
                let book = self.book();
                book.host.get(&key(gpu, region)).is_some_and(|known| !known.is_over())
            }
        }
    }

    /// Whether the GPU reaches our memory, as far as that is known.
    ///
    /// # Errors
    /// Why it doesn't.
    pub(super) fn may_reach(&self, gpu: &Gpu, memory: &Memory) -> Result<(), String> {
        match memory {
            Memory::Device(region) => region.reached_by(gpu).map_err(|error| error.message().to_owned()),
            Memory::Host(region) => match self.book().host.get(&key(gpu, region)) {
                Some(known) if !known.is_over() => known.get().map(drop).map_err(|error| error.message().to_owned()),
                _ => Ok(()),
            },
        }
    }

    /// Drops what is kept of memory that is registered no more. Transfers that run keep theirs.
    pub(crate) fn forget(&self, memory: &Memory) {
        let Ok(region) = memory.host() else { return };
        let at = Arc::as_ptr(region) as usize;
        // Outside the lock: undoing the registration of much memory takes a while.
        let dropped: Vec<_> = self.book().host.extract_if(|&(_, known), _| known == at).collect();
        drop(dropped);
    }

    /// Drops everything. Transfers that are still ending hold what they need.
    pub(crate) fn close(&self) {
        let rest = Book {
            closed: true,
            ..Book::default()
        };
        let dropped = std::mem::replace(&mut *self.book(), rest);
        drop(dropped);
    }
}
