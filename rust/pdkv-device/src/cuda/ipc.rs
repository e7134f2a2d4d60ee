//! Memory of another process on this host, by CUDA IPC.
//!
//! A handle names a whole allocation. Where in it the bytes are that somebody means is for that somebody to say, and for the
//! owner of the mapping to check.

use pdkv_core::Result;

use super::abi::{CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CuIpcMemHandle};
use super::context::Context;

/// The name of an allocation, for other processes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct IpcHandle(pub [u8; 64]);

impl std::fmt::Debug for IpcHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IpcHandle({})", pdkv_core::hex::encode(&self.0[..8]))
    }
}

impl IpcHandle {
    /// The name of the allocation that holds an address.
    ///
    /// # Errors
    /// `Device` when it cannot be shared: memory of expandable segments, managed or host memory, MIG.
    pub fn of(context: &Context, address: u64) -> Result<Self> {
        let _entered = context.enter()?;
        let mut handle = CuIpcMemHandle { reserved: [0; 64] };
        // SAFETY: a struct of ours to write to; the address is only looked up.
        let status = unsafe { (context.functions().cuIpcGetMemHandle)(&raw mut handle, address) };
        context.driver().check("cuIpcGetMemHandle", status)?;
        Ok(Self(handle.reserved))
    }
}

/// An allocation of another process, mapped; unmapped when dropped, which waits for the device.
#[derive(Debug)]
pub struct IpcMapping {
    context: Context,
    address: u64,
}

impl IpcMapping {
    /// Maps an allocation. Where it lies on another device, peer access is switched on.
    ///
    /// # Errors
    /// `Device` when the handle is of this process, no longer of any, or the devices cannot reach each other.
    pub fn open(context: &Context, handle: &IpcHandle) -> Result<Self> {
        let _entered = context.enter()?;
        let mut address = 0;
        let handle = CuIpcMemHandle { reserved: handle.0 };
        let open = context.functions().cuIpcOpenMemHandle_v2;
        // SAFETY: a number of ours to write to; the driver checks the handle.
        let status = unsafe { open(&raw mut address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) };
        context.driver().check("cuIpcOpenMemHandle_v2", status)?;
        Ok(Self {
            context: context.clone(),
            address,
        })
    }

    /// Where the allocation begins in this process.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for IpcMapping {
    fn drop(&mut self) {
        if let Some(_entered) = self.context.enter_to_drop() {
            // SAFETY: mapped by us and unmapped once; the driver waits for what still uses it.
            unsafe { (self.context.functions().cuIpcCloseMemHandle)(self.address) };
        }
    }
}
