//! One engine's UCX: the library, a context for each manner of lane, and the memory that is registered with
//! them. Everything is made at first use, so an engine that never has a lane never loads UCX.
//!
//! There are two contexts because UCX serves emulated put and get on every worker of a context that has
//! one-sided copies at all: a lane of active messages must have a worker that doesn't.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use pdkv_core::lane::Manner;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::HostRegion;
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
    one_sided: Once<Context>,
    messages: Once<Context>,
    /// By manner and by the region itself, which its handle keeps where it is.
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

    /// The context for lanes of this manner, opened at first use. Blocks while UCX is loaded.
    ///
    /// # Errors
    /// `Unsupported` with every place that was searched, `Config` for settings that UCX refuses, `Closed`.
    pub(super) fn context(&self, config: &UcxConfig, manner: Manner) -> Result<Context> {
        let (closed, library, context) = self.state(|state| {
            let context = match manner {
                Manner::OneSided => &state.one_sided,
                Manner::ActiveMessages => &state.messages,
            };
            (state.closed, Arc::clone(&state.library), Arc::clone(context))
        });
        if closed {
            return Err(Error::new(ErrorKind::Closed, "ucx", "the engine was closed"));
        }
        let library = library.get_or_init(|| load(config)).clone()?;
        let open = || {
            let settings = Settings::new(config.settings.iter().cloned());
            let features = Features {
                one_sided: manner == Manner::OneSided,
            };
            Context::open(&library, &settings, features)
        };
        let context = context.get_or_init(open).clone()?;
        pdkv_ucx::before_exit(crate::engine::end_lanes);
        Ok(context)
    }

    /// A region's handle for lanes of this manner, made at first use.
    ///
    /// # Errors
    /// `Capacity` when an adapter can't pin the memory, `Closed`.
    pub(super) fn memory(
        &self,
        registry: &Registry,
        context: &Context,
        manner: Manner,
        region: &Arc<HostRegion>,
    ) -> Result<Arc<MemoryHandle>> {
        let key = (manner == Manner::OneSided, Arc::as_ptr(region) as usize);
        if let Some(handle) = self.state(|state| state.memory.get(&key).cloned()) {
            return Ok(handle);
        }
        let handle = context.map(region)?;
        self.state(|state| {
            if !state.closed {
                state.memory.entry(key).or_insert_with(|| Arc::clone(&handle));
            }
        });
        // It may have been deregistered meanwhile, or is no region of ours: then nobody else would drop this.
        if !registry.lends(region) {
            self.forget(region);
        }
        Ok(handle)
    }

    /// Drops the handles of a region that is registered no more. Operations under way keep theirs.
    pub(crate) fn forget(&self, region: &Arc<HostRegion>) {
        let at = Arc::as_ptr(region) as usize;
        // Outside the lock: undoing the registration of much memory takes a while.
        let dropped = self.state(|state| [true, false].map(|manner| state.memory.remove(&(manner, at))));
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
