//! The kernels of `cuda/`, loaded on a device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use pdkv_core::Result;

use super::bench::Bench;
use super::bulk_size::BulkSize;
use super::context::Context;
use super::find::Origin;
use super::host_paths::HostPaths;
use super::module::{Function, Module};
use crate::kernels::{DeviceFacts, Entry};

/// The kernels, loaded on one device. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Kernels(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    context: Context,
    origin: Origin,
    facts: DeviceFacts,
    functions: HashMap<Entry, Function>,
    host_paths: OnceLock<HostPaths>,
    bulk_size: OnceLock<BulkSize>,
    /// Held while one of them is measured.
    measuring: Mutex<Option<Bench>>,
}

impl Kernels {
    /// Loads an image of the kernels.
    ///
    /// # Errors
    /// `Device` when the driver does not take it, or a kernel is missing: it is of another release.
    ///
    /// # Safety
    /// The image must be whole, and made from [`SOURCE`](crate::kernels::SOURCE) of this release.
    pub unsafe fn load(context: &Context, image: &[u8]) -> Result<Self> {
        // SAFETY: as the caller promises.
        unsafe { Self::load_from(context, image, Origin::Given) }
    }

    /// The same for an image whose origin is known.
    ///
    /// # Errors
    /// As [`Kernels::load`].
    ///
    /// # Safety
    /// As for [`Kernels::load`].
    pub(super) unsafe fn load_from(context: &Context, image: &[u8], origin: Origin) -> Result<Self> {
        let facts = context.device().facts()?;
        // SAFETY: whole, as the caller promises.
        let module = unsafe { Module::load(context, image) }?;
        let mut functions = HashMap::new();
        for entry in Entry::all(facts.capability.0) {
            let shared_bytes = match entry {
                Entry::Bulk { .. } => entry.most_shared_bytes(&facts),
                _ => 0,
            };
            functions.insert(entry, module.function(&entry.name(), shared_bytes)?);
        }
        Ok(Self(Arc::new(Loaded {
            context: context.clone(),
            origin,
            facts,
            functions,
            host_paths: OnceLock::new(),
            bulk_size: OnceLock::new(),
            measuring: Mutex::default(),
        })))
    }

    /// The context that they are loaded in.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// The same kernels, for who knows more of their image. The value must have no clones yet.
    pub(super) fn with_origin(mut self, origin: Origin) -> Self {
        if let Some(loaded) = Arc::get_mut(&mut self.0) {
            loaded.origin = origin;
        }
        self
    }

    /// Where their image came from.
    pub fn origin(&self) -> &Origin {
        &self.0.origin
    }

    /// The device.
    pub fn facts(&self) -> &DeviceFacts {
        &self.0.facts
    }

    /// What was measured between the host and this device.
    pub(super) fn host_paths(&self) -> &OnceLock<HostPaths> {
        &self.0.host_paths
    }

    /// What was measured inside this device.
    pub(super) fn bulk_size(&self) -> &OnceLock<BulkSize> {
        &self.0.bulk_size
    }

    pub(super) fn measuring(&self) -> &Mutex<Option<Bench>> {
        &self.0.measuring
    }

    /// The kernel of an entry that was chosen for this device: every one of those was loaded.
    pub(super) fn function(&self, entry: Entry) -> &Function {
        &self.0.functions[&entry]
    }
}
