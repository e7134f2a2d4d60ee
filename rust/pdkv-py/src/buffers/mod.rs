//! Memory and streams that belong to Python: the only folder of this crate with `unsafe`.
//!
//! Four things need it: DLPack capsules, wrapping an address that a Python object keeps alive, lending a pool out by the
//! buffer protocol, and streams that another library made. No byte of payload is touched here.

mod device;
mod dlpack;
mod held;

use std::any::Any;
use std::ffi::c_int;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::HostRegion;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

pub(crate) use device::{batched, copied, copied_each, on_device, posted, recorded, waited_for};
pub(crate) use dlpack::{dlpack_device, dlpack_facts, lend_dlpack};
pub(crate) use held::Held;

/// Wraps foreign memory as a region that holds `keep` for as long as pdkv may touch it.
///
/// `adopt` moves the whole pages inside into shared memory in place, or refuses with a reason.
pub(crate) fn foreign(address: u64, len: u64, adopt: bool, keep: Py<PyAny>) -> Result<Arc<HostRegion>> {
    // Dropped on an engine thread, the object waits in PyO3's queue for the next attached thread.
    let keep: Box<dyn Any + Send + Sync> = Box::new(keep);
    if adopt {
        // SAFETY: as below. Memory that a driver has pinned is refused before; that nobody writes during
        // the call is the documented duty of whoever asks for `adopt`. The allocators behind numpy and
        // torch give large blocks back to the kernel.
        unsafe { HostRegion::adopt(address, len, keep) }
    } else {
        // SAFETY: `pdkv.memory.describe` took the range from an object that owns it, and `keep` holds that
        // object; the exporters it accepts never move memory they have lent out. A read-only range is
        // never used as a destination.
        unsafe { HostRegion::from_raw(address, len, keep) }
    }
}

/// Wraps memory that the caller of a private function answers for, for the length of the call.
pub(crate) fn bare(address: u64, len: u64) -> Result<Arc<HostRegion>> {
    // SAFETY: `pdkv.bench` passes arrays that it holds while it calls; it is the only caller.
    unsafe { HostRegion::from_raw(address, len, Box::new(())) }
}

/// Copies bytes that a Python object holds for the length of the call.
pub(crate) fn copy_out(address: u64, into: &mut [u8]) -> Result<()> {
    if address == 0 {
        return Err(Error::new(ErrorKind::Region, "send", "the address is null"));
    }
    let from = ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: `pdkv.pipe` took the range from a tensor that the caller of `send` holds; `into` is an exclusive slice,
    // and should the two overlap all the same, `copy` allows it.
    unsafe { ptr::copy(from, into.as_mut_ptr(), into.len()) };
    Ok(())
}

/// Duplicates of file descriptors that Python gave by number.
pub(crate) struct Descriptors(Vec<OwnedFd>);

impl Descriptors {
    pub(crate) fn new(numbers: Vec<i32>) -> Result<Self> {
        let duplicate = |number: i32| {
            let refused = || {
                Error::new(
                    ErrorKind::Config,
                    "sockets",
                    format!("`{number}` is no file descriptor"),
                )
            };
            if number < 0 {
                return Err(refused());
            }
            // SAFETY: the number is not negative, and it is only duplicated: an unused one is an error.
            let given = unsafe { BorrowedFd::borrow_raw(number) };
            given.try_clone_to_owned().map_err(|error| refused().with_source(error))
        };
        numbers.into_iter().map(duplicate).collect::<Result<_>>().map(Self)
    }

    pub(crate) fn borrow(&self) -> Vec<BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd).collect()
    }
}

/// Returns the address of the first element of an exported buffer.
#[pyfunction]
pub(crate) fn buffer_address(buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
    Ok(PyUntypedBuffer::get(buffer)?.buf_ptr().addr())
}

/// Fills a buffer request for `len` writable bytes at `address`, lent by `owner`.
///
/// # Safety
/// `view` must be the request that Python passed to `__getbuffer__`, and `owner` must keep the bytes there.
pub(crate) unsafe fn lend(
    owner: &Bound<'_, PyAny>,
    address: u64,
    len: u64,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    let len = ffi::Py_ssize_t::try_from(len).map_err(|_| PyBufferError::new_err("the memory is too large"))?;
    let address = ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: `view` is valid by contract; the memory stays mapped while `owner` lives, and the view
    // takes a reference to `owner`.
    let status = unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), address, len, 0, flags) };
    if status == 0 {
        Ok(())
    } else {
        Err(PyErr::fetch(owner.py()))
    }
}
