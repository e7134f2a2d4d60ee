//! The CUDA driver, found at run time: absent, too old or without a device is a value with its reason, not a crash.
//!
//! A safe face on the calls that are needed: devices, the primary context, streams, events, memory and launches; in `pages.rs` the
//! kernels of `cuda/` on them; and above these what the engine works with: [`Gpu`], [`DeviceRegion`], the extents of one that another
//! process maps as a [`DeviceMapping`], and [`HostAccess`]. No address from outside is ever used: extents are handles and offsets, checked
//! against what the driver says of them.

mod abi;
mod arrivals;
mod batch;
mod batch_lists;
mod bench;
mod brief;
mod bulk_size;
mod context;
mod device;
mod driver;
mod ends;
mod facts;
mod find;
mod flag;
mod flight;
mod gpu;
mod host;
mod host_paths;
mod ipc;
mod lane_tables;
mod loader;
mod mapping;
mod memory;
mod module;
mod numbers;
mod pages;
mod peer_clock;
mod post_layout;
mod post_tables;
#[cfg(test)]
mod probe;
mod queue;
mod reach;
mod region;
mod ring;
mod route;
mod share;
mod stage;
mod staging;
mod stream;
mod trial;
mod turns;
mod verdict;
mod verified;
mod vmm;
mod witness;

use pdkv_core::Result;

pub use arrivals::AdapterAccess;
pub use batch::{copy_batch_async, has_batch};
pub use bulk_size::BulkSize;
pub use context::Context;
pub use device::Device;
pub use driver::Driver;
pub use facts::{MemoryKind, PointerFacts, pointer_facts};
pub use find::{Attempt, Origin, Sources};
pub use flight::{Cargo, Courier, Landed};
pub use gpu::Gpu;
pub use host::HostAccess;
pub use host_paths::{HostDirection, HostPath, HostPaths, LINK_BLOCKS};
pub use ipc::{IpcHandle, IpcMapping};
pub use mapping::{DeviceMapping, Laying};
pub use memory::{DeviceBuffer, PinnedBuffer, copy_async, copy_each_async};
pub use module::{Extent, Function, Module};
pub use pages::Kernels;
pub use peer_clock::PeerClock;
pub use queue::{CopyQueue, Ticket};
pub use reach::Reach;
pub use region::DeviceRegion;
pub use share::{Handle, SharedExtent};
pub use stage::Stage;
pub use staging::{STAGE_BYTES, Staging, least_staging_bytes};
pub use stream::{Event, Stream};
pub use trial::try_kernels;
pub use turns::Holder;
pub use witness::Witnesses;

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
    matches!(
        facts::raw(address, numbers::CU_POINTER_ATTRIBUTE_MEMORY_TYPE),
        Ok(Some(_))
    )
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
