//! A UCX context: the transports and devices of one configuration, shared by workers of several threads.
//!
//! It is opened for active messages and wake-up, and for one-sided copies where that is asked for; tags,
//! streams and atomics are left out.

use std::fmt;
use std::sync::Arc;

use pdkv_core::{ErrorKind, Result};
use pdkv_device::Memory;

use crate::abi::constants::*;
use crate::abi::{Ucp, Zeroed, ucp_context_attr_t, ucp_context_h, ucp_params_t};
use crate::library::Library;
use crate::memory::MemoryHandle;
use crate::print::printed;
use crate::resource::{self, Resource};
use crate::settings::{Setting, Settings, Source};
use crate::{fork, log, room, status};

/// What a context is for, besides active messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// One-sided copies. Without them a peer's puts and gets find nobody here who would carry them out in
    /// software, so it can't have this process write wherever it likes.
    pub one_sided: bool,
}

/// An open context. Cloning is cheap; the last clone, worker or memory handle that goes cleans it up.
#[derive(Clone)]
pub struct Context(Arc<Opened>);

struct Opened {
    handle: ucp_context_h,
    library: Library,
    resources: Vec<Resource>,
    /// A bit for each kind of memory that its transports know.
    memory_types: u64,
    settings: Vec<Setting>,
    features: Features,
}

// SAFETY: the context is opened with `mt_workers_shared`, which makes UCX lock every call that takes a context, if it was
// built to, and `Library::open` refuses copies that were not; the other fields never change.
unsafe impl Send for Opened {}
// SAFETY: as for `Send`.
unsafe impl Sync for Opened {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("library", &self.0.library)
            .field("resources", &self.0.resources)
            .finish_non_exhaustive()
    }
}

impl Context {
    /// Opens a context of `library`.
    ///
    /// # Errors
    /// `Config` for a setting that UCX refuses; `Unsupported` when no transport is left, or in a forked child.
    pub fn open(library: &Library, settings: &Settings, features: Features) -> Result<Self> {
        let context = Self::open_as(library, settings, features, false)?;
        let ours = |setting: &Setting| setting.name == "TLS" && setting.source == Source::Ours;
        // Nothing else tells whether this copy has it on this host.
        if context.may_have_cuda_ipc() && context.settings().iter().any(ours) {
            drop(context);
            return Self::open_as(library, settings, features, true);
        }
        Ok(context)
    }

    fn may_have_cuda_ipc(&self) -> bool {
        let unread = self.resources().is_empty() && self.knows_gpus();
        unread || self.resources().iter().any(|resource| resource.transport == "cuda_ipc")
    }

    fn open_as(library: &Library, settings: &Settings, features: Features, has_cuda_ipc: bool) -> Result<Self> {
        fork::check("open UCX")?;
        room::check("open UCX")?;
        fork::watch();
        let ucp = library.ucp();
        let mut config = std::ptr::null_mut();
        log::take_last();
        // SAFETY: null takes the prefix `UCX_` and no file; the pointer is ours to fill.
        let read = unsafe { (ucp.ucp_config_read)(std::ptr::null(), std::ptr::null(), &raw mut config) };
        status::check("configure UCX", read)?;
        let applied = settings.apply(library, config, has_cuda_ipc);
        let mut params = ucp_params_t::zeroed();
        params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME;
        params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
        if features.one_sided {
            params.features |= UCP_FEATURE_RMA;
        }
        params.mt_workers_shared = 1;
        params.name = c"pdkv".as_ptr();
        let mut handle = std::ptr::null_mut();
        let opened = applied.and_then(|settings| {
            log::take_last();
            // SAFETY: a zeroed struct with the fields that its mask names, a live configuration, a place for the handle.
            let init = unsafe { (ucp.ucp_init_version)(1, 13, &raw const params, config, &raw mut handle) };
            let hint = "`TLS` is to name what this copy and this host have: `ucx_info -d` of that copy lists it";
            let opened = status::check("open UCX", init).map(|()| settings);
            opened.map_err(|error| match error.kind() {
                ErrorKind::Unsupported => error.with_hint(hint),
                _ => error,
            })
        });
        // SAFETY: read above and released once, whatever became of it.
        unsafe { (ucp.ucp_config_release)(config) };
        let settings = opened?;
        // SAFETY: a live context, and a stream that lives through the call.
        let print = printed(|stream| unsafe { (ucp.ucp_context_print_info)(handle, stream) });
        let resources = resource::in_print(&print.unwrap_or_default());
        Ok(Self(Arc::new(Opened {
            handle,
            library: library.clone(),
            resources,
            memory_types: memory_types(ucp, handle),
            settings,
            features,
        })))
    }

    /// What it was opened for.
    pub fn features(&self) -> Features {
        self.0.features
    }

    /// The copy of UCX it runs on.
    pub fn library(&self) -> &Library {
        &self.0.library
    }

    /// What it can use; empty when UCX's print can't be read.
    pub fn resources(&self) -> &[Resource] {
        &self.0.resources
    }

    /// Whether an RDMA adapter is among them.
    pub fn has_rdma(&self) -> bool {
        self.0.resources.iter().any(Resource::is_rdma)
    }

    /// Whether its transports know memory of NVIDIA GPUs. What carries a copy of it is for a probe to tell.
    pub fn knows_gpus(&self) -> bool {
        self.0.memory_types >> UCS_MEMORY_TYPE_CUDA & 1 != 0
    }

    /// Every default of ours and every wish of the caller, as resolved.
    pub fn settings(&self) -> &[Setting] {
        &self.0.settings
    }

    /// Registers memory for one-sided copies, and that of the host for messages too. With an RDMA adapter this pins
    /// its pages.
    ///
    /// # Errors
    /// `Capacity` when the memory can't be pinned (`ulimit -l`), `Unsupported` for memory of a GPU where no transport
    /// knows it, and in a forked child; `Device` when the GPU can't be used.
    pub fn map(&self, memory: &Memory) -> Result<Arc<MemoryHandle>> {
        MemoryHandle::map(self, memory)
    }

    pub(crate) fn handle(&self) -> ucp_context_h {
        self.0.handle
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// None where UCX doesn't tell.
fn memory_types(ucp: &Ucp, context: ucp_context_h) -> u64 {
    let mut facts = ucp_context_attr_t::zeroed();
    facts.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
    // SAFETY: a live context, and a zeroed struct of ours with the field that its mask names.
    let status = unsafe { (ucp.ucp_context_query)(context, &raw mut facts) };
    if status == UCS_OK { facts.memory_types } else { 0 }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if fork::forked() {
            return;
        }
        // SAFETY: opened once; workers and memory handles hold clones of the context, so none is left.
        unsafe { (self.library.ucp().ucp_cleanup)(self.handle) };
    }
}
