//! Memory of our own for tables, flags and pools, and copies between any memory.

use std::ffi::c_void;

use pdkv_core::Result;

use super::context::Context;
use super::stream::Stream;
use super::verdict::is_dead;
use crate::range::check_inside;

/// Memory of a device, freed when dropped. Freeing waits for the device.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Context,
    address: u64,
    len: usize,
}

/// Page-locked host memory that the device reaches, freed when dropped.
#[derive(Debug)]
pub struct PinnedBuffer {
    context: Context,
    start: *mut c_void,
    len: usize,
}

// SAFETY: plain memory behind raw copies; the driver takes its own locks to free it.
unsafe impl Send for PinnedBuffer {}

impl DeviceBuffer {
    /// Allocates; an empty buffer takes a byte.
    ///
    /// # Errors
    /// `Device` when there is no room.
    pub fn new(context: &Context, len: usize) -> Result<Self> {
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: a number of ours to write to; the context is entered.
        let status = unsafe { (context.functions().cuMemAlloc_v2)(&raw mut address, len.max(1)) };
        context
            .driver()
            .check("cuMemAlloc_v2", status)
            .map_err(|error| error.with("bytes", len))?;
        Ok(Self {
            context: context.clone(),
            address,
            len,
        })
    }

    /// Where it begins on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies host bytes to `offset`, and waits until that is done.
    ///
    /// # Errors
    /// `Region` when they do not fit, `Device` when the driver fails.
    pub fn write(&self, stream: &Stream, offset: usize, bytes: &[u8]) -> Result<()> {
        check_inside("write", self.len as u64, offset as u64, bytes.len() as u64)?;
        // SAFETY: inside this buffer by the check just made, which is borrowed until the copy is over.
        unsafe { put(stream, self.address + offset as u64, bytes) }
    }

    /// Copies bytes at `offset` to the host, and waits until that is done.
    ///
    /// # Errors
    /// `Region` when they do not lie inside, `Device` when the driver fails.
    pub fn read(&self, stream: &Stream, offset: usize, bytes: &mut [u8]) -> Result<()> {
        check_inside("read", self.len as u64, offset as u64, bytes.len() as u64)?;
        // SAFETY: inside this buffer by the check just made, which is borrowed until the copy is over.
        unsafe { get(stream, self.address + offset as u64, bytes) }
    }

    /// Fills all of it, in the order of the stream.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn fill(&self, stream: &Stream, byte: u8) -> Result<()> {
        fill(stream, self.address, byte, self.len)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Some(_entered) = self.context.enter_to_drop() {
            // SAFETY: allocated by us and freed once; the driver waits for what still uses it.
            unsafe { (self.context.functions().cuMemFree_v2)(self.address) };
        }
    }
}

impl PinnedBuffer {
    /// Allocates; an empty buffer takes a byte.
    ///
    /// # Errors
    /// `Device` when there is no room.
    pub fn new(context: &Context, len: usize) -> Result<Self> {
        let _entered = context.enter()?;
        let mut start = std::ptr::null_mut();
        // SAFETY: a pointer of ours to write to; the context is entered.
        let status = unsafe { (context.functions().cuMemHostAlloc)(&raw mut start, len.max(1), 0) };
        context
            .driver()
            .check("cuMemHostAlloc", status)
            .map_err(|error| error.with("bytes", len))?;
        // SAFETY: at least `len` bytes of ours. The driver does not clear them.
        unsafe { start.cast::<u8>().write_bytes(0, len) };
        Ok(Self {
            context: context.clone(),
            start,
            len,
        })
    }

    /// Where it begins, for the host and for the device alike.
    pub fn address(&self) -> u64 {
        self.start.expose_provenance() as u64
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes to `offset`. The device may read them at any time: whoever asked it to must know that it has not begun.
    ///
    /// # Errors
    /// `Region` when they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        check_inside("write", self.len as u64, offset as u64, bytes.len() as u64)?;
        // SAFETY: inside by the check just made.
        let target = unsafe { self.start.cast::<u8>().add(offset) };
        // SAFETY: `bytes` is a live slice elsewhere, for nobody has a reference into this memory; the target has room.
        unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes at `offset` out.
    ///
    /// # Errors
    /// `Region` when they do not lie inside.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        check_inside("read", self.len as u64, offset as u64, bytes.len() as u64)?;
        // SAFETY: inside by the check just made.
        let source = unsafe { self.start.cast::<u8>().add(offset) };
        // SAFETY: `bytes` is a live slice elsewhere, for nobody has a reference into this memory.
        unsafe { source.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Some(_entered) = self.context.enter_to_drop() {
            // SAFETY: allocated by us and freed once; the driver waits for what still uses it.
            unsafe { (self.context.functions().cuMemFreeHost)(self.start) };
        }
    }
}

/// Copies bytes to a device and waits. They go through memory of our own, which is left to the device for good when nobody can say that it is done.
///
/// # Errors
/// `Device` when the driver fails.
///
/// # Safety
/// The range must be live device memory, and nobody else may use it, until this returns; where it fails, as long as the device may still write.
pub(super) unsafe fn put(stream: &Stream, dst: u64, bytes: &[u8]) -> Result<()> {
    let own = bytes.to_vec();
    let src = own.as_ptr().expose_provenance() as u64;
    // SAFETY: the device's range is as the caller promises; ours lives until the device is done.
    unsafe { copy_async(stream, dst, src, own.len()) }?;
    let done = stream.synchronize();
    leave_unless_done(own, &done);
    done
}

/// Copies bytes from a device and waits, as [`put`].
///
/// # Errors
/// `Device` when the driver fails.
///
/// # Safety
/// The range must be live device memory, and nobody else may write it, until this returns.
pub(super) unsafe fn get(stream: &Stream, src: u64, bytes: &mut [u8]) -> Result<()> {
    let mut own = vec![0; bytes.len()];
    let dst = own.as_mut_ptr().expose_provenance() as u64;
    // SAFETY: the device's range is as the caller promises; ours lives until the device is done.
    unsafe { copy_async(stream, dst, src, own.len()) }?;
    let done = stream.synchronize();
    if done.is_ok() {
        bytes.copy_from_slice(&own);
    }
    leave_unless_done(own, &done);
    done
}

fn leave_unless_done(own: Vec<u8>, done: &Result<()>) {
    match done {
        Err(error) if !is_dead(error) => std::mem::forget(own),
        _ => drop(own),
    }
}

/// Fills memory of our own, in the order of the stream. Freeing it waits for the device.
pub(super) fn fill(stream: &Stream, address: u64, byte: u8, len: usize) -> Result<()> {
    let context = stream.context();
    let _entered = context.enter()?;
    // SAFETY: memory of a buffer or a region that the caller borrows or makes.
    let status = unsafe { (context.functions().cuMemsetD8Async)(address, byte, len, stream.handle()) };
    context.driver().check("cuMemsetD8Async", status)
}

/// Copies between any memory that the driver reaches, in the order of the stream. Nothing is copied for a length of 0.
///
/// # Errors
/// `Device` when the driver fails.
///
/// # Safety
/// Both ranges must be live, and nobody else may use them in a conflicting way, until the stream has passed this copy.
pub unsafe fn copy_async(stream: &Stream, dst: u64, src: u64, bytes: usize) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let context = stream.context();
    let _entered = context.enter()?;
    // SAFETY: as the caller promises.
    let status = unsafe { (context.functions().cuMemcpyAsync)(dst, src, bytes, stream.handle()) };
    context.driver().check("cuMemcpyAsync", status)
}

/// Copies pieces of one size, (destination, source), one call each and nothing between: what a loop of the driver's own copies costs.
///
/// # Errors
/// `Device` when the driver fails.
///
/// # Safety
/// As for [`copy_async`], of every piece.
pub unsafe fn copy_each_async(stream: &Stream, pieces: impl Iterator<Item = (u64, u64)>, bytes: usize) -> Result<()> {
    let context = stream.context();
    let _entered = context.enter()?;
    let copy = context.functions().cuMemcpyAsync;
    for (dst, src) in pieces {
        // SAFETY: as the caller promises; the context is entered.
        let status = unsafe { copy(dst, src, bytes, stream.handle()) };
        context.driver().check("cuMemcpyAsync", status)?;
    }
    Ok(())
}
