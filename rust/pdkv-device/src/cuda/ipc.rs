//! Memory of another process on this host, by CUDA IPC.
//!
//! A handle names a whole allocation. Where in it the bytes are that somebody means is for that somebody to say, and for the
//! owner of the mapping to check.

use std::sync::{Mutex, PoisonError};

use pdkv_core::Result;

use super::abi::CuIpcMemHandle;
use super::context::Context;
use super::numbers::{
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
};

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

/// An allocation of another process, mapped. Whoever opens it again in this process shares the mapping; it goes with its last holder.
#[derive(Debug)]
pub struct IpcMapping {
    context: Context,
    handle: IpcHandle,
    address: u64,
}

/// A mapping of this process, and how many hold it. Opening and closing happen under the lock: a driver need not open one handle twice.
struct Open {
    driver: usize,
    ordinal: u32,
    handle: IpcHandle,
    address: u64,
    holders: usize,
}

static OPEN: Mutex<Vec<Open>> = Mutex::new(Vec::new());

impl IpcMapping {
    /// Maps an allocation. Where it lies on another device, peer access is switched on.
    ///
    /// # Errors
    /// `Device` when the handle is of this process, no longer of any, or the devices cannot reach each other.
    pub fn open(context: &Context, handle: &IpcHandle) -> Result<Self> {
        let (driver, ordinal) = (context.driver().identity(), context.device().ordinal());
        let _entered = context.enter()?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let known = |open: &&mut Open| (open.driver, open.ordinal, open.handle) == (driver, ordinal, *handle);
        let address = if let Some(known) = open.iter_mut().find(known) {
            known.holders += 1;
            known.address
        } else {
            let address = map(context, handle)?;
            open.push(Open {
                driver,
                ordinal,
                handle: *handle,
                address,
                holders: 1,
            });
            address
        };
        Ok(Self {
            context: context.clone(),
            handle: *handle,
            address,
        })
    }

    /// Where the allocation begins in this process.
    pub fn address(&self) -> u64 {
        self.address
    }
}

fn map(context: &Context, handle: &IpcHandle) -> Result<u64> {
    let mut address = 0;
    let handle = CuIpcMemHandle { reserved: handle.0 };
    let open = context.functions().cuIpcOpenMemHandle_v2;
    // SAFETY: a number of ours to write to; the driver checks the handle.
    let status = unsafe { open(&raw mut address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) };
    let checked = context.driver().check("cuIpcOpenMemHandle_v2", status);
    match status {
        CUDA_ERROR_INVALID_CONTEXT => checked.map_err(|error| {
            error.with_hint("a process cannot open a handle of its own memory, whose address it has")
        })?,
        CUDA_ERROR_PEER_ACCESS_UNSUPPORTED => checked.map_err(|error| {
            error.with_hint(
                "the memory is on another GPU, and there is neither NVLink nor peer access by PCIe between the two",
            )
        })?,
        _ => checked?,
    }
    Ok(address)
}

impl Drop for IpcMapping {
    fn drop(&mut self) {
        let Some(_entered) = self.context.enter_to_drop() else {
            return;
        };
        let (driver, ordinal) = (self.context.driver().identity(), self.context.device().ordinal());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let known = |open: &Open| (open.driver, open.ordinal, open.handle) == (driver, ordinal, self.handle);
        let Some(at) = open.iter().position(known) else {
            return;
        };
        open[at].holders -= 1;
        if open[at].holders == 0 {
            open.swap_remove(at);
            // SAFETY: mapped by us, and nobody holds it any more: whoever asks the device for anything there holds it until that is over.
            unsafe { (self.context.functions().cuIpcCloseMemHandle)(self.address) };
        }
    }
}
