//! Memory of another process, mapped where the kernels of this one reach it.
//!
//! What the other process says of its extents is checked before a kernel may go there: they follow one another without gaps, lie inside their
//! allocations, and these are as long as the driver says. Extents of several allocations are laid side by side at addresses of our own.

use std::os::fd::AsFd;
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};

use super::context::Context;
use super::facts::{allocation_of, pointer_facts};
use super::gpu::Gpu;
use super::ipc::{IpcHandle, IpcMapping};
use super::region::DeviceRegion;
use super::share::{Handle, SharedExtent};
use super::verdict::judged;
use super::vmm::{Allocation, Reservation, granularity};
use crate::range::{check_inside, check_range};

/// A region of another process, whole; unmapped with its last holder, who must have waited for what it
/// asked the device to do there.
#[derive(Debug)]
pub struct DeviceMapping {
    gpu: Gpu,
    address: u64,
    len: u64,
    /// The number of the device that the memory is on, where this process sees it.
    home: Option<u32>,
    #[expect(dead_code, reason = "held for its drop")]
    backing: Backing,
}

#[derive(Debug)]
#[expect(dead_code, reason = "held for its drop")]
enum Backing {
    Ipc(IpcMapping),
    Laid(Reservation),
}

/// A region whose extents come one after another; dropped, it leaves nothing behind.
#[derive(Debug)]
pub struct Laying {
    gpu: Gpu,
    region_len: u64,
    /// Bytes of the region that are there.
    reached: u64,
    laid: Laid,
}

#[derive(Debug)]
enum Laid {
    Nothing,
    Ipc {
        mapping: IpcMapping,
        offset: u64,
    },
    Allocations {
        reservation: Reservation,
        granularity: u64,
        /// Where in the reservation the region begins.
        offset: u64,
        /// Whether the last extent ended with its allocation, so that another one can follow.
        open: bool,
    },
}

const MAP: &str = "map a peer's GPU memory";

impl DeviceMapping {
    /// Maps a region of `region_len` bytes from all its extents. An allocation that CUDA IPC names is mapped once for the process, however often
    /// it is opened.
    ///
    /// # Errors
    /// `Region` for extents that cannot be those of a region; `Unsupported` where the GPU cannot reach the memory or it cannot be laid side by
    /// side; `Device` when the driver refuses a handle: of this process, of one that has ended, of a device that is hidden here.
    pub fn open(gpu: &Gpu, region_len: u64, extents: &[SharedExtent]) -> Result<Arc<Self>> {
        let mut laying = Laying::new(gpu, region_len)?;
        for extent in extents {
            laying.add(extent)?;
        }
        laying.finish()
    }

    /// The GPU through which this process reaches the memory, wherever that is.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The address of the region's first byte in this process.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the memory is a GPU's own: what another one reaches of it goes over a link.
    pub fn lies_on(&self, gpu: &Gpu) -> bool {
        self.home == Some(gpu.ordinal())
    }

    /// The memory as a region, which keeps the mapping.
    pub fn region(self: &Arc<Self>) -> Arc<DeviceRegion> {
        DeviceRegion::of_peer(Arc::clone(self))
    }
}

impl Laying {
    /// Begins with nothing.
    ///
    /// # Errors
    /// `Region` for a length that no region has.
    pub fn new(gpu: &Gpu, region_len: u64) -> Result<Self> {
        check_range(MAP, 1, region_len)?;
        Ok(Self {
            gpu: gpu.clone(),
            region_len,
            reached: 0,
            laid: Laid::Nothing,
        })
    }

    /// Maps the next extent. Its descriptor is not needed any longer.
    ///
    /// # Errors
    /// As [`DeviceMapping::open`].
    pub fn add(&mut self, extent: &SharedExtent) -> Result<()> {
        let end = extent.offset.checked_add(extent.len);
        let inside =
            end.is_some_and(|end| end <= extent.allocation_len && isize::try_from(extent.allocation_len).is_ok());
        let left = self.region_len - self.reached;
        if extent.region_offset != self.reached || extent.len == 0 || extent.len > left || !inside {
            let message = format!(
                "an extent of `{}` bytes at `{}`, at `{}` of an allocation of `{}`, does not come next at `{}` of `{}`",
                extent.len, extent.region_offset, extent.offset, extent.allocation_len, self.reached, self.region_len
            );
            return Err(Error::new(ErrorKind::Region, MAP, message));
        }
        match &extent.handle {
            Handle::Ipc(handle) => self.add_ipc(extent, &IpcHandle(*handle)),
            Handle::Fd(fd) => self.add_allocation(extent, |gpu| Allocation::from_fd(gpu.context(), fd.as_fd())),
            Handle::Fabric(handle) => self.add_allocation(extent, |gpu| Allocation::from_fabric(gpu.context(), handle)),
        }
        .map_err(judged)?;
        self.reached += extent.len;
        Ok(())
    }

    fn add_ipc(&mut self, extent: &SharedExtent, handle: &IpcHandle) -> Result<()> {
        if !matches!(self.laid, Laid::Nothing) {
            return Err(side_by_side("CUDA IPC puts each allocation where it likes"));
        }
        let mapping = IpcMapping::open(self.gpu.context(), handle)?;
        let (base, size) = extent_of(self.gpu.context(), mapping.address())?;
        let before = mapping.address() - base;
        check_inside(MAP, size.saturating_sub(before), extent.offset, extent.len)?;
        let offset = extent.offset;
        self.laid = Laid::Ipc { mapping, offset };
        Ok(())
    }

    fn add_allocation(&mut self, extent: &SharedExtent, import: impl FnOnce(&Gpu) -> Result<Allocation>) -> Result<()> {
        let allocation = import(&self.gpu)?;
        let owner = allocation.ordinal()?;
        if let Laid::Nothing = self.laid {
            let granularity = granularity(self.gpu.context(), owner.unwrap_or(self.gpu.ordinal()))?;
            // Allocations are mapped whole, so the last one may reach past the region; most often it is as long as the first.
            let whole = extent.offset.checked_add(self.region_len);
            let whole = whole.and_then(|whole| whole.checked_add(extent.allocation_len));
            let whole = whole.and_then(|whole| whole.checked_next_multiple_of(granularity));
            let whole = whole.ok_or_else(|| Error::new(ErrorKind::Region, MAP, "the region has no end"))?;
            self.laid = Laid::Allocations {
                reservation: Reservation::new(self.gpu.context(), whole)?,
                granularity,
                offset: extent.offset,
                open: true,
            };
        } else if extent.offset != 0 {
            return Err(side_by_side("an extent after the first begins inside its allocation"));
        }
        let Laid::Allocations {
            reservation,
            granularity,
            offset,
            open,
        } = &mut self.laid
        else {
            return Err(side_by_side("CUDA IPC puts each allocation where it likes"));
        };
        if !*open {
            return Err(side_by_side("an extent before the last ends inside its allocation"));
        }
        let end = extent.offset + extent.len;
        let at = *offset + self.reached - extent.offset;
        if !extent.allocation_len.is_multiple_of(*granularity) || !at.is_multiple_of(*granularity) {
            return Err(side_by_side("an allocation is no multiple of what the GPU maps"));
        }
        // A part of an allocation where the whole has no room behind the region.
        let room = reservation.len() - at;
        let len = if extent.allocation_len <= room {
            extent.allocation_len
        } else {
            end.next_multiple_of(*granularity)
        };
        *open = end == extent.allocation_len;
        reservation.map(at, len, &allocation)?;
        let ordinal = self.gpu.ordinal();
        reservation.allow_last(ordinal).map_err(|error| match owner {
            Some(owner) if owner != ordinal => error.with_hint(
                "the memory is on another GPU, and there is neither NVLink nor peer access by PCIe between the two",
            ),
            _ => error,
        })
    }

    /// The region, once all of it is there.
    ///
    /// # Errors
    /// `Region` when extents are missing.
    pub fn finish(self) -> Result<Arc<DeviceMapping>> {
        if self.reached != self.region_len {
            let message = format!("extents for `{}` of `{}` bytes", self.reached, self.region_len);
            return Err(Error::new(ErrorKind::Region, MAP, message));
        }
        let (address, backing) = match self.laid {
            Laid::Ipc { mapping, offset } => (mapping.address() + offset, Backing::Ipc(mapping)),
            Laid::Allocations {
                reservation, offset, ..
            } => (reservation.address() + offset, Backing::Laid(reservation)),
            // A region has a byte, so it has an extent.
            Laid::Nothing => return Err(Error::new(ErrorKind::Internal, MAP, "a region without extents")),
        };
        // Nothing but speed depends on it, so a driver that does not say is no failure.
        let facts = pointer_facts(self.gpu.context(), address).ok().flatten();
        Ok(Arc::new(DeviceMapping {
            home: facts.and_then(|facts| facts.ordinal),
            gpu: self.gpu,
            address,
            len: self.region_len,
            backing,
        }))
    }
}

/// Where memory that CUDA IPC has mapped begins here, and its bytes. The call is documented for memory of `cuMemAlloc`; a driver that refuses it for
/// another process's says the same by the address's facts, which for such memory are those of the allocation.
fn extent_of(context: &Context, address: u64) -> Result<(u64, u64)> {
    allocation_of(context, address).or_else(|error| match pointer_facts(context, address)? {
        Some(facts) if facts.len > 0 => Ok((facts.base, facts.len)),
        _ => Err(error),
    })
}

fn side_by_side(reason: &str) -> Error {
    let message = format!("the allocations of the region cannot be laid side by side: {reason}");
    Error::new(ErrorKind::Unsupported, MAP, message)
}
