//! Memory that a GPU reaches, whatever it is, and what keeps it so.

use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};

use super::gpu::Gpu;
use super::host::HostAccess;
use super::mapping::DeviceMapping;
use super::region::DeviceRegion;

/// Memory that a GPU reaches, and what keeps it so.
#[derive(Clone, Debug)]
pub enum Reach {
    /// Of this process, on this GPU or on one beside it.
    Device(Arc<DeviceRegion>),
    /// Of another process on this host.
    Mapping(Arc<DeviceMapping>),
    /// Of the host, registered with the driver.
    Host(Arc<HostAccess>),
}

/// Where memory lies, as seen from the GPU that copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// On that GPU.
    Here,
    /// On another GPU.
    Beside,
    /// In the host's memory.
    Host,
}

impl Reach {
    /// Where the GPU finds the first byte.
    pub fn device_address(&self) -> u64 {
        match self {
            Self::Device(region) => region.address(),
            Self::Mapping(mapping) => mapping.address(),
            Self::Host(access) => access.device_address(),
        }
    }

    /// The number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "memory is never empty")]
    pub fn len(&self) -> u64 {
        match self {
            Self::Device(region) => region.len(),
            Self::Mapping(mapping) => mapping.len(),
            Self::Host(access) => access.len(),
        }
    }

    pub(super) fn side(&self, gpu: &Gpu) -> Side {
        let here = match self {
            Self::Host(_) => return Side::Host,
            Self::Device(region) => region.lies_on(gpu),
            Self::Mapping(mapping) => mapping.lies_on(gpu),
        };
        if here { Side::Here } else { Side::Beside }
    }

    /// Whether a GPU may write there.
    pub(super) fn is_writable(&self) -> bool {
        match self {
            Self::Host(access) => access.region().writable(),
            Self::Device(_) | Self::Mapping(_) => true,
        }
    }

    /// Whether a GPU reaches it.
    ///
    /// # Errors
    /// As [`DeviceRegion::reached_by`].
    pub(super) fn reached_by(&self, gpu: &Gpu) -> Result<()> {
        let mapped_for = match self {
            Self::Device(region) => return region.reached_by(gpu),
            Self::Mapping(mapping) => mapping.gpu(),
            Self::Host(access) => access.gpu(),
        };
        if mapped_for.ordinal() == gpu.ordinal() {
            return Ok(());
        }
        let message = format!("the memory is mapped for GPU `{}`", mapped_for.ordinal());
        Err(Error::new(ErrorKind::Unsupported, "use GPU memory", message))
    }
}
