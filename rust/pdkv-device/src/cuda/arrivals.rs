//! What others put into the memory of a GPU past the driver, as network adapters do, and the calls that other libraries make of the driver.
//!
//! An adapter says when its writes have left it; that the GPU sees them is another matter on some platforms, and a matter of the driver's.

use pdkv_core::{Error, ErrorKind, Result};

use super::gpu::Gpu;
use super::numbers as n;

/// How network adapters reach a GPU's memory, as far as its driver says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterAccess {
    /// The kernel can hand a part of it to an adapter's driver.
    pub dma_buf: bool,
    /// The GPU has the older way, which takes a module beside the two drivers: `nvidia-peermem`.
    pub peer_memory: bool,
}

impl Gpu {
    /// How adapters reach its memory.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn adapter_access(&self) -> Result<AdapterAccess> {
        let device = self.context().device();
        let has = |attribute| device.attribute(attribute).map(|value| value != 0);
        Ok(AdapterAccess {
            dma_buf: has(n::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)?,
            peer_memory: has(n::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)?,
        })
    }

    /// Why nobody could say when the GPU sees what an adapter has written into its memory; nothing may be written there then.
    ///
    /// # Errors
    /// The reason.
    pub fn may_see_arrivals(&self) -> Result<(), String> {
        self.sees_by_itself().map(|_| ())
    }

    /// Makes what adapters have written into the GPU's memory up to now visible to whatever any GPU of this host is asked from now on. Costs
    /// nothing where the platform keeps that order by itself, some microseconds elsewhere; waits for no kernel.
    ///
    /// # Errors
    /// `Unsupported` as [`may_see_arrivals`](Self::may_see_arrivals), `Device` when the driver fails.
    pub fn see_arrivals(&self) -> Result<()> {
        let by_itself = self
            .sees_by_itself()
            .map_err(|reason| Error::new(ErrorKind::Unsupported, "see what has arrived", reason))?;
        if by_itself {
            return Ok(());
        }
        let context = self.context();
        let _entered = context.enter()?;
        let flush = context.functions().cuFlushGPUDirectRDMAWrites;
        // SAFETY: two numbers of the driver's own; the context is entered.
        let status = unsafe {
            flush(
                n::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                n::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES,
            )
        };
        context.driver().check("cuFlushGPUDirectRDMAWrites", status)
    }

    /// Whether every GPU sees what arrives without being told to look.
    fn sees_by_itself(&self) -> Result<bool, String> {
        let device = self.context().device();
        let ask = |attribute| device.attribute(attribute).map_err(|error| error.message().to_owned());
        if ask(n::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?
            >= n::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES
        {
            return Ok(true);
        }
        let options = ask(n::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?;
        if options & n::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST != 0 {
            return Ok(false);
        }
        Err(format!(
            "GPU `{}` can't be made to see what an adapter has written into its memory",
            self.ordinal()
        ))
    }

    /// Runs something with the GPU's context as the thread's own, and no part of any capture: for other libraries, which ask the driver themselves.
    ///
    /// # Errors
    /// `Device` when the context can't be entered.
    pub fn inside<R>(&self, run: impl FnOnce() -> R) -> Result<R> {
        let _entered = self.context().enter()?;
        Ok(run())
    }
}
