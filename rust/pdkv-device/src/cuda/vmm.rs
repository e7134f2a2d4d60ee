//! The driver's virtual memory: allocations apart from the addresses at which they are mapped, which is how expandable segments are made and
//! how they come from another process.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use pdkv_core::{Error, ErrorKind, Result};

use super::abi::{CuMemAccessDesc, CuMemAllocationProp, CuMemHandle, CuMemLocation};
use super::context::Context;
use super::device::Device;
use super::numbers as n;
use super::verdict::is_dead;
use crate::range::check_inside;

/// A hold on an allocation; let go when dropped. The memory lives until nobody holds or maps it, in any process.
#[derive(Debug)]
pub(super) struct Allocation {
    context: Context,
    handle: CuMemHandle,
}

/// A range of addresses, and what is mapped there; unmapped and given back when dropped.
#[derive(Debug)]
pub(super) struct Reservation {
    context: Context,
    address: u64,
    len: u64,
    mapped: Vec<(u64, u64)>,
    /// Whether the addresses are given to users, whose kernels nobody tells us of.
    anybodys: bool,
}

/// Memory of our own on a device, mapped there, that another process can be given by a descriptor.
///
/// # Errors
/// `Unsupported` when the device has no such memory, `Device` when there is no room.
pub(super) fn allocate(device: &Device, context: &Context, len: u64) -> Result<Reservation> {
    for needed in [
        n::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        n::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    ] {
        if device.attribute(needed)? == 0 {
            let message = "the device has no memory that descriptors name";
            return Err(Error::new(ErrorKind::Unsupported, "allocate GPU memory", message));
        }
    }
    let rdma = device.attribute(n::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)? != 0;
    let properties = CuMemAllocationProp {
        gpu_direct_rdma_capable: u8::from(rdma),
        ..properties_on(device.ordinal().cast_signed())
    };
    let len = len.next_multiple_of(granularity_of(context, &properties)?);
    let mut reservation = Reservation::new(context, len)?;
    reservation.anybodys = true;
    let mut handle = 0;
    let entered = context.enter()?;
    let create = context.functions().cuMemCreate;
    // SAFETY: a number of ours to write to, a struct of ours to read; the flags must be 0.
    let status = unsafe { create(&raw mut handle, len as usize, &raw const properties, 0) };
    let checked = context.driver().check("cuMemCreate", status);
    checked.map_err(|error| error.with("bytes", len))?;
    drop(entered);
    let allocation = Allocation {
        context: context.clone(),
        handle,
    };
    reservation.map(0, len, &allocation)?;
    reservation.allow_last(device.ordinal())?;
    Ok(reservation)
}

impl Allocation {
    /// The allocation that is mapped at an address.
    ///
    /// # Errors
    /// `Device` when there is none, as with memory of `cudaMalloc` and of memory pools.
    pub(super) fn mapped_at(context: &Context, address: u64) -> Result<Self> {
        let _entered = context.enter()?;
        let mut handle = 0;
        let retain = context.functions().cuMemRetainAllocationHandle;
        // SAFETY: a number of ours to write to; the address is only looked up.
        let status = unsafe { retain(&raw mut handle, std::ptr::with_exposed_provenance_mut(address as usize)) };
        context.driver().check("cuMemRetainAllocationHandle", status)?;
        Ok(Self {
            context: context.clone(),
            handle,
        })
    }

    /// What another process exported to this descriptor.
    ///
    /// # Errors
    /// `Device` when it is no such export, or of a device that this process does not see.
    pub(super) fn from_fd(context: &Context, fd: BorrowedFd<'_>) -> Result<Self> {
        let number = (fd.as_raw_fd() as isize).cast_unsigned();
        // The descriptor's number itself takes the pointer's place.
        let os_handle = std::ptr::without_provenance_mut(number);
        Self::import(context, os_handle, n::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    }

    /// What a process of this fabric exported.
    ///
    /// # Errors
    /// `Device` when it is no such export, or the fabric is not to be had.
    pub(super) fn from_fabric(context: &Context, handle: &[u8; 64]) -> Result<Self> {
        let mut handle = *handle;
        Self::import(context, (&raw mut handle).cast(), n::CU_MEM_HANDLE_TYPE_FABRIC)
    }

    fn import(context: &Context, os_handle: *mut std::ffi::c_void, kind: c_int) -> Result<Self> {
        let _entered = context.enter()?;
        let mut handle = 0;
        let import = context.functions().cuMemImportFromShareableHandle;
        // SAFETY: a number of ours to write to, and a live descriptor or 64 bytes, as `kind` says; the driver checks what they name.
        let status = unsafe { import(&raw mut handle, os_handle, kind) };
        context.driver().check("cuMemImportFromShareableHandle", status)?;
        Ok(Self {
            context: context.clone(),
            handle,
        })
    }

    fn properties(&self) -> Result<CuMemAllocationProp> {
        let mut properties = properties_on(0);
        let ask = self.context.functions().cuMemGetAllocationPropertiesFromHandle;
        // SAFETY: a struct of ours to write to, and a handle that this value holds.
        let status = unsafe { ask(&raw mut properties, self.handle) };
        self.context
            .driver()
            .check("cuMemGetAllocationPropertiesFromHandle", status)?;
        Ok(properties)
    }

    /// Ways in which its owner lets it be exported, as a mask of `CUmemAllocationHandleType`.
    pub(super) fn handle_types(&self) -> Result<c_int> {
        Ok(self.properties()?.requested_handle_types)
    }

    /// The number of its device; `None` where it is no device's.
    pub(super) fn ordinal(&self) -> Result<Option<u32>> {
        let location = self.properties()?.location;
        let device = location.kind == n::CU_MEM_LOCATION_TYPE_DEVICE;
        Ok(u32::try_from(location.id).ok().filter(|_| device))
    }

    /// A descriptor that another process can import.
    pub(super) fn export_fd(&self) -> Result<OwnedFd> {
        let mut fd: c_int = -1;
        self.export((&raw mut fd).cast(), n::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)?;
        if fd < 0 {
            let message = "`cuMemExportToShareableHandle` gave no descriptor";
            return Err(Error::new(ErrorKind::Device, "share GPU memory", message));
        }
        // SAFETY: made for us by the driver, and nobody else has its number.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// A name that another process of this fabric can import.
    pub(super) fn export_fabric(&self) -> Result<[u8; 64]> {
        let mut handle = [0_u8; 64];
        self.export((&raw mut handle).cast(), n::CU_MEM_HANDLE_TYPE_FABRIC)?;
        Ok(handle)
    }

    fn export(&self, into: *mut std::ffi::c_void, kind: c_int) -> Result<()> {
        let _entered = self.context.enter()?;
        let export = self.context.functions().cuMemExportToShareableHandle;
        // SAFETY: room for what `kind` says, an integer or 64 bytes, and a handle that this value holds.
        let status = unsafe { export(into, self.handle, kind, 0) };
        self.context.driver().check("cuMemExportToShareableHandle", status)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some(_entered) = self.context.enter_to_drop() {
            // SAFETY: held once by this value. What is mapped stays.
            unsafe { (self.context.functions().cuMemRelease)(self.handle) };
        }
    }
}

/// What sizes and addresses of mappings on a device are multiples of.
///
/// # Errors
/// `Device` when the driver has no such memory for it.
pub(super) fn granularity(context: &Context, ordinal: u32) -> Result<u64> {
    granularity_of(context, &properties_on(ordinal.cast_signed()))
}

fn granularity_of(context: &Context, properties: &CuMemAllocationProp) -> Result<u64> {
    let _entered = context.enter()?;
    let mut bytes = 0;
    let ask = context.functions().cuMemGetAllocationGranularity;
    // SAFETY: a number of ours to write to, and a struct of ours to read.
    let status = unsafe { ask(&raw mut bytes, properties, n::CU_MEM_ALLOC_GRANULARITY_MINIMUM) };
    context.driver().check("cuMemGetAllocationGranularity", status)?;
    Ok((bytes as u64).max(1))
}

fn properties_on(ordinal: c_int) -> CuMemAllocationProp {
    CuMemAllocationProp {
        kind: n::CU_MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: n::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: on(ordinal),
        win32_handle_meta_data: std::ptr::null_mut(),
        compression_type: 0,
        gpu_direct_rdma_capable: 0,
        usage: 0,
        reserved: [0; 4],
    }
}

fn on(ordinal: c_int) -> CuMemLocation {
    CuMemLocation {
        kind: n::CU_MEM_LOCATION_TYPE_DEVICE,
        id: ordinal,
    }
}

impl Reservation {
    /// Takes addresses, a multiple of the granularity long. Nothing is there yet.
    ///
    /// # Errors
    /// `Device` when there are not as many.
    pub(super) fn new(context: &Context, len: u64) -> Result<Self> {
        let _entered = context.enter()?;
        let mut address = 0;
        let reserve = context.functions().cuMemAddressReserve;
        // SAFETY: a number of ours to write to; addresses of the driver's choice.
        let status = unsafe { reserve(&raw mut address, len as usize, 0, 0, 0) };
        context
            .driver()
            .check("cuMemAddressReserve", status)
            .map_err(|error| error.with("bytes", len))?;
        Ok(Self {
            context: context.clone(),
            address,
            len,
            mapped: Vec::new(),
            anybodys: false,
        })
    }

    /// Where it begins.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Maps the first `len` bytes of an allocation at `offset`.
    ///
    /// # Errors
    /// `Device` when the allocation is shorter, or something is there already.
    pub(super) fn map(&mut self, offset: u64, len: u64, allocation: &Allocation) -> Result<()> {
        check_inside("map GPU memory", self.len, offset, len)?;
        let _entered = self.context.enter()?;
        let address = self.address + offset;
        let map = self.context.functions().cuMemMap;
        // SAFETY: inside addresses that this value reserved, and a handle that is held; the driver refuses what overlaps.
        let status = unsafe { map(address, len as usize, 0, allocation.handle, 0) };
        self.context.driver().check("cuMemMap", status)?;
        self.mapped.push((address, len));
        Ok(())
    }

    /// Lets a device read and write what was mapped last.
    ///
    /// # Errors
    /// `Device` when it cannot reach the memory.
    pub(super) fn allow_last(&self, ordinal: u32) -> Result<()> {
        match self.mapped.last() {
            Some(&(address, len)) => allow(&self.context, address, len, ordinal),
            None => Ok(()),
        }
    }
}

/// Lets a device read and write one whole mapping, whoever made it; what others may do stays as it is.
///
/// # Errors
/// `Device` when the device cannot reach the memory, or this is no mapping.
pub(super) fn allow(context: &Context, address: u64, len: u64, ordinal: u32) -> Result<()> {
    let _entered = context.enter()?;
    let access = CuMemAccessDesc {
        location: on(ordinal.cast_signed()),
        flags: n::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    let set = context.functions().cuMemSetAccess;
    // SAFETY: the driver refuses what is no mapping, and one more device with access harms nobody; one struct of ours to read.
    let status = unsafe { set(address, len as usize, &raw const access, 1) };
    context.driver().check("cuMemSetAccess", status)
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // Unlike freeing, unmapping does not wait for those who use the memory. A peer's is used by those alone who hold the mapping until they are done;
        // a pool by anybody's kernels, to which it is left for good where nobody can say that they are done.
        let used = self.anybodys && !self.mapped.is_empty();
        let quiet = !used
            || self
                .context
                .synchronize()
                .map_or_else(|error| is_dead(&error), |()| true);
        let Some(_entered) = self.context.enter_to_drop().filter(|_| quiet) else {
            return;
        };
        for &(address, len) in &self.mapped {
            // SAFETY: mapped by us, unmapped once, and nothing uses it any more, as was just said.
            unsafe { (self.context.functions().cuMemUnmap)(address, len as usize) };
        }
        // SAFETY: reserved by us, given back once, and nothing is mapped there any more.
        unsafe { (self.context.functions().cuMemAddressFree)(self.address, self.len as usize) };
    }
}
