//! One engine's UCX: the library, two contexts, and the memory that is registered with them. Everything is
//! made at first use, so an engine that never has a lane never loads UCX.
//!
//! There are two contexts because UCX carries out emulated puts and gets of the peer on every worker of a
//! context that has one-sided operations at all. Only who posts them needs such a worker: an owner's has
//! none, and adapters and kernels reach its memory all the same.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Memory;
use pdkv_ucx::find::{self, Search};
use pdkv_ucx::{Context, Features, Library, MemoryHandle, Settings};

use crate::config::{EngineConfig, TransportKind, UcxConfig};
use crate::registry::Registry;

type Once<T> = Arc<OnceLock<Result<T>>>;

/// What the engine keeps of UCX between lanes.
#[derive(Default)]
pub(crate) struct Runtime {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    library: Once<Library>,
    puts: Once<Context>,
    messages: Once<Context>,
    /// By context and by the region itself, which its handle keeps where it is.
    memory: HashMap<(bool, usize), Arc<MemoryHandle>>,
    closed: bool,
}

/// Why this engine has no lanes, if it has none.
pub(crate) fn unwanted(config: &EngineConfig) -> Option<String> {
    if !config.kinds().contains(&TransportKind::Ucx) {
        return Some("`ucx` is not among its `transports`".to_owned());
    }
    let wanted = config.names(TransportKind::Ucx) || has_adapters();
    (!wanted).then(|| "no RDMA device on this host; name `ucx` in `transports` to use it over other lanes".to_owned())
}

/// Whether this host has RDMA devices.
pub(super) fn has_adapters() -> bool {
    !find::rdma_devices().is_empty()
}

impl Runtime {
    fn state<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.state.lock().expect("no holder panics"))
    }

    /// The context whose workers can put and get, or the one whose workers can't and don't carry out
    /// the peer's either. Opened at first use; blocks while UCX is loaded.
    ///
    /// # Errors
    /// `Unsupported` with every place that was searched, `Config` for settings that UCX refuses, `Closed`.
    pub(super) fn context(&self, config: &UcxConfig, puts: bool) -> Result<Context> {
        let (closed, library, context) = self.state(|state| {
            let context = if puts { &state.puts } else { &state.messages };
            (state.closed, Arc::clone(&state.library), Arc::clone(context))
        });
        if closed {
            return Err(Error::new(ErrorKind::Closed, "ucx", "the engine was closed"));
        }
        let library = library.get_or_init(|| load(config)).clone()?;
        let open = || {
            let settings = Settings::new(config.settings.iter().cloned());
            let features = Features { one_sided: puts };
            Context::open(&library, &settings, features)
        };
        let context = context.get_or_init(open).clone()?;
        pdkv_ucx::before_exit(crate::closing::end_lanes);
        Ok(context)
    }

    /// A region's handle in one of the two contexts, made at first use.
    ///
    /// # Errors
    /// `Capacity` when an adapter can't pin the memory, `Unsupported` for memory of a GPU where UCX knows none, `Closed`.
    pub(super) fn memory(&self, registry: &Registry, context: &Context, memory: &Memory) -> Result<Arc<MemoryHandle>> {
        let key = (context.features().one_sided, place_of(memory));
        if let Some(handle) = self.state(|state| state.memory.get(&key).cloned()) {
            return Ok(handle);
        }
        let handle = context.map(memory)?;
        self.state(|state| {
            if !state.closed {
                state.memory.entry(key).or_insert_with(|| Arc::clone(&handle));
            }
        });
        // It may have been deregistered meanwhile, or is no region of ours: then nobody else would drop this.
        if !registry.holds(memory) {
            self.forget(memory);
        }
        Ok(handle)
    }

    /// Drops the handles of a region that is registered no more. Operations under way keep theirs.
    pub(crate) fn forget(&self, memory: &Memory) {
        let at = place_of(memory);
        // Outside the lock: undoing the registration of much memory takes a while.
        let dropped = self.state(|state| [true, false].map(|puts| state.memory.remove(&(puts, at))));
        drop(dropped);
    }

    /// Drops everything. Lanes that are still ending hold what they need.
    pub(crate) fn close(&self) {
        let dropped = self.state(|state| {
            let rest = State {
                closed: true,
                ..State::default()
            };
            std::mem::replace(state, rest)
        });
        drop(dropped);
    }

    /// Handles that are kept.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.state(|state| state.memory.len())
    }
}

/// What tells a region from every other as long as something keeps it.
fn place_of(memory: &Memory) -> usize {
    match memory {
        Memory::Host(region) => Arc::as_ptr(region) as usize,
        Memory::Device(region) => Arc::as_ptr(region) as usize,
    }
}

fn load(config: &UcxConfig) -> Result<Library> {
    let search = Search {
        explicit: config.library.clone(),
        wheels: config.search.clone(),
    };
    let (found, attempts) = find::find(&search);
    for attempt in attempts {
        tracing::debug!(place = %attempt.place, outcome = ?attempt.outcome, "looked for UCX");
    }
    found
}
