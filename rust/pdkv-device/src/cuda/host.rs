//! Host memory that a GPU reads and writes by itself: pinned already, or registered with the driver as long as somebody needs it.

use std::sync::{Arc, Mutex, PoisonError};

use pdkv_core::{Error, ErrorKind, Result};

use super::context::Context;
use super::facts::{MemoryKind, allocation_of, pointer_facts};
use super::gpu::Gpu;
use super::numbers as n;
use super::verdict::judged;
use crate::region::HostRegion;

/// A host region as its GPU sees it.
///
/// Drop order: what is registered is unregistered, if this was its last holder, before the region may be unmapped.
#[derive(Debug)]
pub struct HostAccess {
    #[expect(dead_code, reason = "held for its drop")]
    registration: Option<Registration>,
    gpu: Gpu,
    region: Arc<HostRegion>,
    device_address: u64,
}

/// A hold on memory that is registered with the driver, once for the process and for all its GPUs.
#[derive(Debug)]
struct Registration {
    context: Context,
    start: u64,
}

struct Registered {
    driver: usize,
    start: u64,
    end: u64,
    writable: bool,
    holders: usize,
}

static REGISTERED: Mutex<Vec<Registered>> = Mutex::new(Vec::new());

const REGISTER: &str = "register host memory with the GPU";
const WHOLE: &str = "register the whole of the memory with pdkv first";

impl HostAccess {
    /// Gives a GPU access to a host region. Memory that is not pinned yet is registered with the driver, whole: for a part of a region the region
    /// that it is a part of. That pins every page, and takes the time that this takes.
    ///
    /// # Errors
    /// `Unsupported` when the GPU cannot, `Device` when the driver refuses: memory of a file, or a part of which is registered already.
    pub fn of(gpu: &Gpu, region: &Arc<HostRegion>) -> Result<Arc<Self>> {
        let (whole, writable) = (region.root(), region.writable());
        let registration = Registration::of(gpu, &whole, writable)?;
        let device_address = device_address(gpu.context(), whole.address())? + (region.address() - whole.address());
        Ok(Arc::new(Self {
            registration,
            gpu: gpu.clone(),
            region: Arc::clone(region),
            device_address,
        }))
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The host region.
    pub fn region(&self) -> &Arc<HostRegion> {
        &self.region
    }

    /// Where the GPU finds the region's first byte.
    pub fn device_address(&self) -> u64 {
        self.device_address
    }

    /// The number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.region.len()
    }
}

impl Registration {
    /// `None` for memory that somebody else has pinned.
    fn of(gpu: &Gpu, region: &HostRegion, writable: bool) -> Result<Option<Self>> {
        let context = gpu.context();
        let driver = context.driver().identity();
        let (start, end) = (region.address(), region.address() + region.len());
        let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
        let known = |entry: &&mut Registered| entry.driver == driver && entry.start <= start && end <= entry.end;
        if let Some(entry) = registered.iter_mut().find(known) {
            if writable && !entry.writable {
                let message = "the memory is registered to be read only";
                return Err(Error::new(ErrorKind::Unsupported, REGISTER, message));
            }
            entry.holders += 1;
            return Ok(Some(Self {
                context: context.clone(),
                start: entry.start,
            }));
        }
        if pinned(context, start, end)? {
            return Ok(None);
        }
        register(gpu, start, end, writable)?;
        registered.push(Registered {
            driver,
            start,
            end,
            writable,
            holders: 1,
        });
        Ok(Some(Self {
            context: context.clone(),
            start,
        }))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let driver = self.context.driver().identity();
        let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
        let known = |entry: &Registered| (entry.driver, entry.start) == (driver, self.start);
        let Some(at) = registered.iter().position(known) else {
            return;
        };
        registered[at].holders -= 1;
        if registered[at].holders > 0 {
            return;
        }
        registered.swap_remove(at);
        if let Some(_entered) = self.context.enter_to_drop() {
            let unregister = self.context.functions().cuMemHostUnregister;
            // SAFETY: registered by us at this address, and nobody holds it any more: whoever asks the device for anything there holds it until
            // that is over.
            unsafe { unregister(std::ptr::with_exposed_provenance_mut(self.start as usize)) };
        }
    }
}

/// Whether the driver knows host memory already, from end to end as one.
fn pinned(context: &Context, start: u64, end: u64) -> Result<bool> {
    for address in [start, end - 1] {
        let Some(facts) = pointer_facts(context, address)? else {
            continue;
        };
        if facts.kind != MemoryKind::Host {
            let message = format!("the memory at `{address:#x}` is no host memory");
            return Err(Error::new(ErrorKind::Region, REGISTER, message));
        }
        let (base, len) = match facts.len {
            0 => range_of_pinned(context, address)?,
            len => (facts.base, len),
        };
        if base <= start && end - base <= len {
            return Ok(true);
        }
        let message =
            format!("a part of the memory at `{start:#x}` is pinned or registered already, the rest is not, or apart");
        return Err(Error::new(ErrorKind::Unsupported, REGISTER, message).with_hint(WHOLE));
    }
    Ok(false)
}

/// The range of pinned memory of which the driver does not say it among the other facts: those are documented for devices.
fn range_of_pinned(context: &Context, address: u64) -> Result<(u64, u64)> {
    let device = device_address(context, address)?;
    let (base, len) = allocation_of(context, device).map_err(judged)?;
    // As far before the address as on the device, whose addresses may be others.
    Ok((address.saturating_sub(device.saturating_sub(base)), len))
}

fn register(gpu: &Gpu, start: u64, end: u64, writable: bool) -> Result<()> {
    let (context, device) = (gpu.context(), gpu.context().device());
    if device.attribute(n::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)? == 0 {
        let message = format!("`{}` cannot be given host memory that it did not allocate", gpu.name());
        return Err(Error::new(ErrorKind::Unsupported, REGISTER, message));
    }
    let mut flags = n::CU_MEMHOSTREGISTER_PORTABLE | n::CU_MEMHOSTREGISTER_DEVICEMAP;
    if !writable {
        if device.attribute(n::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)? == 0 {
            let message = format!("`{}` cannot be given memory that is mapped to be read only", gpu.name());
            return Err(Error::new(ErrorKind::Unsupported, REGISTER, message));
        }
        flags |= n::CU_MEMHOSTREGISTER_READ_ONLY;
    }
    let _entered = context.enter()?;
    let call = context.functions().cuMemHostRegister_v2;
    let address = std::ptr::with_exposed_provenance_mut(start as usize);
    // SAFETY: memory of a live region, which whoever holds the registration keeps; nothing but its pages' pinning changes.
    let status = unsafe { call(address, (end - start) as usize, flags) };
    let checked = context.driver().check("cuMemHostRegister_v2", status);
    checked.map_err(|error| {
        let error = error.with("bytes", end - start);
        if status == n::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED {
            return error.with_hint(WHOLE);
        }
        error
    })
}

fn device_address(context: &Context, address: u64) -> Result<u64> {
    let _entered = context.enter()?;
    let mut found = 0;
    let ask = context.functions().cuMemHostGetDevicePointer_v2;
    // SAFETY: a number of ours to write to; the address is only looked up, and the flags must be 0.
    let status = unsafe {
        ask(
            &raw mut found,
            std::ptr::with_exposed_provenance_mut(address as usize),
            0,
        )
    };
    if status != 0 {
        // Documented for where an allocation begins; the other way is documented for every address, of what others have pinned as well.
        let ask = context.functions().cuPointerGetAttribute;
        // SAFETY: a word of ours, as wide as the attribute; the address is only looked up.
        let told = unsafe { ask((&raw mut found).cast(), n::CU_POINTER_ATTRIBUTE_DEVICE_POINTER, address) };
        if told == 0 {
            return Ok(found);
        }
    }
    context.driver().check("cuMemHostGetDevicePointer_v2", status)?;
    Ok(found)
}
