//! Memory of a device for a short while, given and taken back in the order of a stream: neither waits for the device, as `cuMemFree` does, which holds up
//! whoever computes there.

use pdkv_core::Result;

use super::context::Context;
use super::numbers::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
use super::stream::Stream;

/// Memory of the device's own pool, to be used in the order of one stream alone. What is dropped goes back behind all that the stream was asked
/// until then, and to the other users of the device when somebody has waited for that.
#[derive(Debug)]
pub(super) struct BriefBuffer {
    stream: Stream,
    address: u64,
}

impl BriefBuffer {
    /// Allocates.
    ///
    /// # Errors
    /// `Device` when there is no room.
    pub(super) fn new(stream: &Stream, len: u64) -> Result<Self> {
        let context = stream.context();
        let _entered = context.enter()?;
        let mut address = 0;
        let allocate = context.functions().cuMemAllocAsync;
        // SAFETY: a number of ours to write to, and a live stream; the context is entered.
        let status = unsafe { allocate(&raw mut address, len as usize, stream.handle()) };
        context
            .driver()
            .check("cuMemAllocAsync", status)
            .map_err(|error| error.with("bytes", len))?;
        Ok(Self {
            stream: stream.clone(),
            address,
        })
    }

    /// Where it begins on the device.
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for BriefBuffer {
    fn drop(&mut self) {
        let context = self.stream.context();
        if let Some(_entered) = context.enter_to_drop() {
            // SAFETY: allocated by us in this stream and freed once, behind all that uses it.
            unsafe { (context.functions().cuMemFreeAsync)(self.address, self.stream.handle()) };
        }
    }
}

/// Whether the device of a context has such memory.
///
/// # Errors
/// `Device` when the driver fails.
pub(super) fn has_brief_memory(context: &Context) -> Result<bool> {
    Ok(context.device().attribute(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0)
}

/// Bytes that nobody has of a device's memory.
///
/// # Errors
/// `Device` when the driver fails.
pub(super) fn free_bytes(context: &Context) -> Result<u64> {
    let _entered = context.enter()?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: two numbers of ours to write to; the context is entered.
    let status = unsafe { (context.functions().cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
    context.driver().check("cuMemGetInfo_v2", status)?;
    Ok(free as u64)
}
