//! A device as the driver shows it: its numbers, and what it cannot do.

use std::ffi::{CStr, c_int};

use pdkv_core::Result;

use super::abi::{CuDevice, CuUuid};
use super::context::Context;
use super::driver::Driver;
use super::numbers as n;
use crate::kernels::DeviceFacts;

/// A device. Nothing is made on it by looking.
#[derive(Clone, Debug)]
pub struct Device {
    driver: Driver,
    handle: CuDevice,
    ordinal: u32,
}

impl Device {
    pub(super) fn new(driver: &Driver, ordinal: u32) -> Result<Self> {
        let mut handle = 0;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: an integer of ours to write to; any number may be asked for.
        let status = unsafe { (driver.functions().cuDeviceGet)(&raw mut handle, number) };
        driver
            .check("cuDeviceGet", status)
            .map_err(|error| error.with("device", ordinal))?;
        Ok(Self {
            driver: driver.clone(),
            handle,
            ordinal,
        })
    }

    /// Its number among those that this process may see.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Its name, as in `NVIDIA H200`.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn name(&self) -> Result<String> {
        let mut text = [0_u8; 256];
        // SAFETY: room for as many bytes as are said, the last of which stays 0.
        let status = unsafe { (self.driver.functions().cuDeviceGetName)(text.as_mut_ptr().cast(), 255, self.handle) };
        self.driver.check("cuDeviceGetName", status)?;
        let name = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    /// Why no other device reaches its memory, if none does.
    ///
    /// CUDA IPC and peer access end at the border of an instance of a GPU in MIG mode. Whether processes on one and the same instance can
    /// share memory is for a try to tell.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn isolated(&self) -> Result<Option<String>> {
        let name = self.name()?;
        if name.split_whitespace().any(|word| word == "MIG") {
            return Ok(Some(format!(
                "`{name}` is a MIG instance, whose border neither CUDA IPC nor peer access crosses"
            )));
        }
        if self.attribute(n::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)? == 0 {
            return Ok(Some(format!("`{name}` has no unified addressing")));
        }
        Ok(None)
    }

    /// The name that it has in every process, whatever number it has there.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = CuUuid::default();
        // SAFETY: a struct of ours to write to.
        let status = unsafe { (self.driver.functions().cuDeviceGetUuid_v2)(&raw mut uuid, self.handle) };
        self.driver.check("cuDeviceGetUuid_v2", status)?;
        Ok(uuid.bytes)
    }

    /// Whether kernels on this device can be given the memory of another one.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn can_reach(&self, other: &Self) -> Result<bool> {
        let mut can = 0;
        let ask = self.driver.functions().cuDeviceCanAccessPeer;
        // SAFETY: an integer of ours to write to, and devices that the driver named.
        let status = unsafe { ask(&raw mut can, self.handle, other.handle) };
        self.driver.check("cuDeviceCanAccessPeer", status)?;
        Ok(can != 0)
    }

    /// What a launch needs to know.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn facts(&self) -> Result<DeviceFacts> {
        let number = |attribute| self.attribute(attribute).map(c_int::unsigned_abs);
        Ok(DeviceFacts {
            capability: (
                number(n::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                number(n::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: number(n::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            threads_per_multiprocessor: number(n::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
            shared_bytes: number(n::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
            block_shared_bytes: number(n::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        })
    }

    /// Whether somebody in this process has made its primary context.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn in_use(&self) -> Result<bool> {
        let (mut flags, mut active) = (0, 0);
        let ask = self.driver.functions().cuDevicePrimaryCtxGetState;
        // SAFETY: two integers of ours to write to, and a device that the driver named.
        let status = unsafe { ask(self.handle, &raw mut flags, &raw mut active) };
        self.driver.check("cuDevicePrimaryCtxGetState", status)?;
        Ok(active != 0)
    }

    /// Its primary context, the one that torch and all of CUDA's runtime use.
    ///
    /// # Errors
    /// `Device` when the driver cannot make it.
    pub fn context(&self) -> Result<Context> {
        Context::retain(self)
    }

    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    pub(super) fn handle(&self) -> CuDevice {
        self.handle
    }

    pub(super) fn attribute(&self, attribute: c_int) -> Result<c_int> {
        let mut value = 0;
        // SAFETY: an integer of ours to write to.
        let status = unsafe { (self.driver.functions().cuDeviceGetAttribute)(&raw mut value, attribute, self.handle) };
        self.driver.check("cuDeviceGetAttribute", status)?;
        Ok(value)
    }
}
