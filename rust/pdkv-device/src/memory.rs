//! The two kinds of memory that can be registered: of the host, and of a GPU.

use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};

use crate::cuda::DeviceRegion;
use crate::region::{HostRegion, SharedPart};

/// Memory with a stable address and length. Cloning gives another handle on the same memory.
#[derive(Clone, Debug)]
pub enum Memory {
    /// Of this host: any processor reaches it.
    Host(Arc<HostRegion>),
    /// Of a GPU: whoever is no GPU asks the driver for copies.
    Device(Arc<DeviceRegion>),
}

impl From<Arc<HostRegion>> for Memory {
    fn from(region: Arc<HostRegion>) -> Self {
        Self::Host(region)
    }
}

impl From<Arc<DeviceRegion>> for Memory {
    fn from(region: Arc<DeviceRegion>) -> Self {
        Self::Device(region)
    }
}

impl Memory {
    /// The number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        match self {
            Self::Host(region) => region.len(),
            Self::Device(region) => region.len(),
        }
    }

    /// The address of the first byte, in this process or on its GPU.
    pub fn address(&self) -> u64 {
        match self {
            Self::Host(region) => region.address(),
            Self::Device(region) => region.address(),
        }
    }

    /// The memory, for those who only move bytes of the host.
    ///
    /// # Errors
    /// `Unsupported` for memory of a GPU.
    pub fn host(&self) -> Result<&Arc<HostRegion>> {
        match self {
            Self::Host(region) => Ok(region),
            Self::Device(region) => Err(Error::new(
                ErrorKind::Unsupported,
                "reach memory",
                format!("device memory of GPU `{}`", region.gpu().ordinal()),
            )
            .with_hint("the `cuda` transport moves it, between processes of one host")),
        }
    }

    /// The memory, if it is of a GPU.
    pub fn device(&self) -> Option<&Arc<DeviceRegion>> {
        match self {
            Self::Host(_) => None,
            Self::Device(region) => Some(region),
        }
    }

    /// The part that a peer on this host can map by a descriptor. Memory of a GPU has none: it is shared by other means.
    pub fn shared(&self) -> Option<SharedPart<'_>> {
        match self {
            Self::Host(region) => region.shared(),
            Self::Device(_) => None,
        }
    }

    /// Whether both are handles on one and the same region.
    pub fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Host(one), Self::Host(other)) => Arc::ptr_eq(one, other),
            (Self::Device(one), Self::Device(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// Copies bytes out of the memory. On a GPU, waits for the copy and for nothing that was asked before.
    ///
    /// # Errors
    /// `Region` when the range does not lie inside, `Device` when the driver fails.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        match self {
            Self::Host(region) => region.read_at(offset, into),
            Self::Device(region) => region.read_at(offset, into),
        }
    }

    /// Copies bytes into the memory. On a GPU, as [`read_at`](Self::read_at).
    ///
    /// # Errors
    /// `Region` when the range does not lie inside or must not be written, `Device` when the driver fails.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Host(region) => region.write_at(offset, bytes),
            Self::Device(region) => region.write_at(offset, bytes),
        }
    }

    /// Sets `len` bytes to `value`. On a GPU, as [`read_at`](Self::read_at).
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn fill(&self, offset: u64, len: u64, value: u8) -> Result<()> {
        match self {
            Self::Host(region) => region.fill(offset, len, value),
            Self::Device(region) => {
                let piece = vec![value; len.min(1 << 20) as usize];
                let mut done = 0;
                while done < len {
                    let step = (len - done).min(piece.len() as u64);
                    region.write_at(offset.saturating_add(done), &piece[..step as usize])?;
                    done += step;
                }
                Ok(())
            }
        }
    }
}
