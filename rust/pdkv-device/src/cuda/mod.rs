//! The CUDA driver, found at run time: absent, too old or without a device is a value with its reason, not a crash.
//!
//! A safe face on the calls that are needed: devices, the primary context, streams, events, memory, IPC, and launches; and, in
//! `pages.rs`, the kernels of `cuda/` on them. No transport uses it yet.

mod abi;
mod context;
mod device;
mod driver;
mod find;
mod ipc;
mod lane_tables;
mod memory;
mod module;
mod pages;
mod post_layout;
mod post_tables;
#[cfg(test)]
mod probe;
mod queue;
mod ring;
mod stream;

use std::ffi::{c_int, c_void};

use pdkv_core::Result;

pub use context::Context;
pub use device::Device;
pub use driver::Driver;
pub use find::{Attempt, Origin, Sources};
pub use ipc::{IpcHandle, IpcMapping};
pub use memory::{DeviceBuffer, MemoryKind, PinnedBuffer, PointerFacts, copy_async, pointer_facts};
pub use module::{Extent, Function, Module};
pub use pages::{Kernels, Prepared};
pub use queue::{CopyQueue, Ticket};
pub use stream::{Event, Stream};

use crate::object::Object;
use driver::LIBRARY;

/// What a look for the driver found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// No usable driver, and why.
    Absent {
        /// The cause in words.
        reason: String,
    },
    /// A driver that initialises.
    Present {
        /// The CUDA version it speaks, as in `(13, 0)`.
        version: (u32, u32),
        /// How many devices it shows.
        devices: u32,
    },
}

type PointerAttribute = unsafe extern "C" fn(*mut c_void, c_int, u64) -> c_int;

const MEMORY_TYPE: c_int = 2;

/// Looks for the driver by dlopen and asks it for its version and devices. Makes no context.
pub fn probe() -> Presence {
    Presence::of(Driver::open())
}

impl Presence {
    fn of(driver: Result<Driver>) -> Self {
        let found = driver.and_then(|driver| Ok((driver.version(), driver.device_count()?)));
        match found {
            Ok((version, devices)) => Self::Present { version, devices },
            Err(error) => Self::Absent {
                reason: error.message().to_owned(),
            },
        }
    }
}

/// Whether the driver, if the process already uses it, knows the address as its own or as registered.
pub(crate) fn knows(address: u64) -> bool {
    let Some(library) = Object::loaded(LIBRARY) else {
        return false;
    };
    let Some(query) = library.symbol("cuPointerGetAttribute") else {
        return false;
    };
    // SAFETY: `cuPointerGetAttribute(void *, CUpointer_attribute, CUdeviceptr)`, unchanged since CUDA 4.0.
    let query: PointerAttribute = unsafe { std::mem::transmute(query) };
    let mut kind: u64 = 0;
    // SAFETY: the memory type is one unsigned int, for which `kind` has room; the address is only looked up.
    unsafe { query((&raw mut kind).cast(), MEMORY_TYPE, address) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_and_presence_are_both_values() {
        match probe() {
            Presence::Absent { reason } => assert!(!reason.is_empty()),
            Presence::Present { version, .. } => assert!(version.0 >= 9),
        }
    }

    #[test]
    fn plain_memory_is_not_the_drivers() {
        let word = std::hint::black_box(7_u64);
        assert!(!knows((&raw const word).expose_provenance() as u64));
    }
}
