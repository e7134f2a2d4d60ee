//! The primary context of a device, and being in it.
//!
//! A thread of the caller's keeps the context that it has: each call here enters and leaves again. While it is in, the thread says that its calls are no
//! part of any CUDA graph that somebody captures, or else most of them would fail, and the capture with them.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::Arc;

use pdkv_core::Result;

use super::abi::{CuContext, Functions};
use super::device::Device;
use super::driver::Driver;
use super::numbers::CU_STREAM_CAPTURE_MODE_RELAXED;

/// A retained primary context; released with its last clone. Everything made in it keeps it.
#[derive(Clone, Debug)]
pub struct Context(Arc<Retained>);

#[derive(Debug)]
struct Retained {
    device: Device,
    handle: CuContext,
}

// SAFETY: the driver takes its own locks; a context may be entered from any thread, and from several at once.
unsafe impl Send for Retained {}
// SAFETY: as for `Send`.
unsafe impl Sync for Retained {}

/// The thread is in a context as long as this lives.
pub(super) struct Entered<'a> {
    driver: &'a Driver,
    /// How the thread stood to captures before, once that was changed.
    capture: Option<c_int>,
    /// What is left is the thread's own stack of contexts.
    thread: PhantomData<*mut ()>,
}

impl Context {
    pub(super) fn retain(device: &Device) -> Result<Self> {
        let mut handle = std::ptr::null_mut();
        let retain = device.driver().functions().cuDevicePrimaryCtxRetain;
        // SAFETY: a pointer of ours to write to, and a device that the driver named.
        let status = unsafe { retain(&raw mut handle, device.handle()) };
        device.driver().check("cuDevicePrimaryCtxRetain", status)?;
        Ok(Self(Arc::new(Retained {
            device: device.clone(),
            handle,
        })))
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    pub(super) fn driver(&self) -> &Driver {
        self.0.device.driver()
    }

    pub(super) fn functions(&self) -> &Functions {
        self.driver().functions()
    }

    /// Waits for all that is asked of the device in this context, by anybody in the process.
    ///
    /// # Errors
    /// `Device` when something has failed there, or while somebody captures a graph in this context, which this breaks.
    pub(super) fn synchronize(&self) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: no arguments; the context is entered.
        let status = unsafe { (self.functions().cuCtxSynchronize)() };
        self.driver().check("cuCtxSynchronize", status)
    }

    pub(super) fn handle(&self) -> CuContext {
        self.0.handle
    }

    /// Enters; what the caller's thread had is back when the result is dropped.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        let driver = self.driver();
        driver.usable()?;
        // SAFETY: a context that is retained as long as `self` lives, which the result borrows.
        let status = unsafe { (driver.functions().cuCtxPushCurrent_v2)(self.0.handle) };
        driver.check("cuCtxPushCurrent_v2", status)?;
        let mut entered = Entered {
            driver,
            capture: None,
            thread: PhantomData,
        };
        let mut capture = CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: an integer of ours, which is exchanged for the thread's own.
        let status = unsafe { (driver.functions().cuThreadExchangeStreamCaptureMode)(&raw mut capture) };
        driver.check("cuThreadExchangeStreamCaptureMode", status)?;
        entered.capture = Some(capture);
        Ok(entered)
    }

    /// Enters for a destructor, which has nobody to tell and must not leave a handle behind for want of a context.
    pub(super) fn enter_to_drop(&self) -> Option<Entered<'_>> {
        self.enter().ok()
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(mut capture) = self.capture {
            // SAFETY: an integer of ours, with what the thread had.
            unsafe { (self.driver.functions().cuThreadExchangeStreamCaptureMode)(&raw mut capture) };
        }
        let mut left = std::ptr::null_mut();
        // SAFETY: this thread pushed a context and everything entered since has been left; a pointer of ours to write to.
        unsafe { (self.driver.functions().cuCtxPopCurrent_v2)(&raw mut left) };
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        if self.device.driver().usable().is_err() {
            return;
        }
        let release = self.device.driver().functions().cuDevicePrimaryCtxRelease_v2;
        // SAFETY: retained once by this value. Fails only when the driver itself is going away.
        unsafe { release(self.device.handle()) };
    }
}
