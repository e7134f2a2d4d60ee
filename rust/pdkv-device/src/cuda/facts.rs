//! What the driver knows of an address.

use std::ffi::{c_int, c_uint, c_void};

use pdkv_core::{Error, ErrorKind, Result};

use super::context::{Context, Entered};
use super::driver::{self, Driver};
use super::numbers as n;

type PointerAttribute = unsafe extern "C" fn(*mut c_void, c_int, u64) -> c_int;

/// An attribute of an address that is up to 8 bytes wide, asked of a driver that the process already uses, whoever loaded it; `None` for
/// memory that is not its own, and where there is no driver.
///
/// # Errors
/// The status of a driver that fails: the memory may be anybody's.
pub(super) fn raw(address: u64, attribute: c_int) -> Result<Option<u64>, c_int> {
    let query = driver::loaded().and_then(|library| library.symbol("cuPointerGetAttribute"));
    let Some(query) = query else {
        return Ok(None);
    };
    // SAFETY: `cuPointerGetAttribute(void *, CUpointer_attribute, CUdeviceptr)`, unchanged since CUDA 4.0.
    let query: PointerAttribute = unsafe { std::mem::transmute(query) };
    let mut value = 0_u64;
    // SAFETY: a word of ours has room for the attributes that are asked for; the address is only looked up.
    match unsafe { query((&raw mut value).cast(), attribute, address) } {
        0 => Ok(Some(value)),
        n::CUDA_ERROR_INVALID_VALUE | n::CUDA_ERROR_NOT_INITIALIZED | n::CUDA_ERROR_DEINITIALIZED => Ok(None),
        status => Err(status),
    }
}

/// The numbers that a driver gives to the memory at an address: to the physical memory, and to the allocation.
///
/// Together no other memory of the process has them, nor had. One alone is not enough: small allocations of `cudaMalloc` share physical
/// memory, and what an allocation is where physical memory is mapped by hand the driver does not document.
pub(super) type Identity = [Option<u64>; 2];

/// The identity of the memory at an address; without numbers where it is not the driver's. The caller has entered the context.
///
/// # Errors
/// `Device` when the driver fails.
pub(super) fn identity(context: &Context, _entered: &Entered<'_>, address: u64) -> Result<Identity> {
    let ask = context.functions().cuPointerGetAttribute;
    let mut identity = [None; 2];
    let attributes = [
        n::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID,
        n::CU_POINTER_ATTRIBUTE_BUFFER_ID,
    ];
    for (number, attribute) in identity.iter_mut().zip(attributes) {
        let mut id = 0_u64;
        // SAFETY: a word of ours, as wide as either attribute; the address is only looked up.
        match unsafe { ask((&raw mut id).cast(), attribute, address) } {
            0 => *number = Some(id),
            // No memory of the driver's, or no attribute of this driver's or of such memory.
            n::CUDA_ERROR_INVALID_VALUE | n::CUDA_ERROR_NOT_SUPPORTED => {}
            status => return Err(failed(address, status)),
        }
    }
    Ok(identity)
}

/// The same where a driver wants to be asked in a context: in those that the process has. Without any nobody has memory.
///
/// # Errors
/// As [`Gpu::open`](super::Gpu::open), and `Device` when the driver fails.
pub(super) fn raw_in_a_context(address: u64, attribute: c_int) -> Result<Option<u64>> {
    let driver = Driver::open()?;
    for ordinal in 0..driver.device_count()? {
        let device = driver.device(ordinal)?;
        if !device.in_use()? {
            continue;
        }
        let context = device.context()?;
        let _entered = context.enter()?;
        if let Some(found) = raw(address, attribute).map_err(|status| failed(address, status))? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

pub(super) fn failed(address: u64, status: c_int) -> Error {
    let message = format!("`cuPointerGetAttribute` returned `{status}` for `{address:#x}`");
    Error::new(ErrorKind::Device, "look an address up", message).with("status", status)
}

/// The allocation, or the one mapping of several that lie side by side, which holds an address: where it begins, and its bytes.
///
/// # Errors
/// `Device` when the driver knows none.
pub(super) fn allocation_of(context: &Context, address: u64) -> Result<(u64, u64)> {
    let _entered = context.enter()?;
    let (mut base, mut len) = (0, 0);
    let ask = context.functions().cuMemGetAddressRange_v2;
    // SAFETY: two numbers of ours to write to; the address is only looked up.
    let status = unsafe { ask(&raw mut base, &raw mut len, address) };
    context.driver().check("cuMemGetAddressRange_v2", status)?;
    Ok((base, len as u64))
}

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// In host memory that the driver knows.
    Host,
    /// On a device.
    Device,
    /// Wherever the driver moves it.
    Managed,
}

/// What the driver knows of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerFacts {
    /// Where the memory lies.
    pub kind: MemoryKind,
    /// The number of its device, if it has one.
    pub ordinal: Option<u32>,
    /// Where the allocation, or the reserved range of addresses, begins that holds the address.
    pub base: u64,
    /// Bytes of it.
    pub len: u64,
    /// Whether CUDA IPC can share it: memory of `cudaMalloc` is, that of expandable segments is not.
    pub ipc: bool,
}

/// What the driver knows of an address; `None` for memory that is not its own.
///
/// # Errors
/// `Device` when the driver fails.
pub fn pointer_facts(context: &Context, address: u64) -> Result<Option<PointerFacts>> {
    const ATTRIBUTES: [c_int; 6] = [
        n::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        n::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        n::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        n::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        n::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        n::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    ];
    let (mut kind, mut managed, mut ordinal, mut ipc) = (0_u32, 0_u32, 0_i32, 0_u32);
    let (mut base, mut len) = (0_u64, 0_u64);
    let values: [*mut c_void; 6] = [
        (&raw mut kind).cast(),
        (&raw mut managed).cast(),
        (&raw mut ordinal).cast(),
        (&raw mut ipc).cast(),
        (&raw mut base).cast(),
        (&raw mut len).cast(),
    ];
    let _entered = context.enter()?;
    let count = ATTRIBUTES.len() as c_uint;
    // SAFETY: six attributes and six places, each as wide as its attribute or wider; the address is only looked up.
    let status =
        unsafe { (context.functions().cuPointerGetAttributes)(count, ATTRIBUTES.as_ptr(), values.as_ptr(), address) };
    if status == n::CUDA_ERROR_INVALID_CONTEXT {
        // The context is there, it was just entered: the memory is none of any context, which other releases say by a type of 0.
        return Ok(None);
    }
    context.driver().check("cuPointerGetAttributes", status)?;
    let kind = match kind {
        n::CU_MEMORYTYPE_HOST => MemoryKind::Host,
        n::CU_MEMORYTYPE_DEVICE if managed == 0 => MemoryKind::Device,
        n::CU_MEMORYTYPE_DEVICE | n::CU_MEMORYTYPE_UNIFIED => MemoryKind::Managed,
        _ => return Ok(None),
    };
    Ok(Some(PointerFacts {
        kind,
        ordinal: u32::try_from(ordinal).ok(),
        base,
        len,
        // Booleans are one byte wide: the rest stays 0 as it was.
        ipc: ipc != 0,
    }))
}
