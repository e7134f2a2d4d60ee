//! Memory that belongs to Python: the only file of this crate with `unsafe`.
//!
//! Three things need it: reading a DLPack capsule, wrapping an address that a Python object keeps
//! alive, and lending a pool out by the buffer protocol. No byte of payload is touched here.

use std::any::Any;
use std::ffi::{CStr, c_int, c_void};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::HostRegion;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

use crate::enter;

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

/// `DLTensor` of dlpack.h.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned` of dlpack.h; its predecessor is the bare tensor and a deleter.
#[repr(C)]
struct DlVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DlTensor,
}

const DLPACK_MAJOR: u32 = 1;
const DLPACK_READ_ONLY: u64 = 1;
const VERSIONED: &CStr = c"dltensor_versioned";
const PLAIN: &CStr = c"dltensor";

/// Address, shape, strides in bytes, item size, dtype and read-only flag of a DLPack capsule.
type DlpackFacts = (u64, Vec<i64>, Option<Vec<i64>>, u64, String, bool);

/// Returns (address, shape, strides in bytes or None, itemsize, dtype, readonly) of a DLPack capsule
/// without consuming it: the capsule must be kept for as long as the memory is used.
#[pyfunction]
#[pyo3(signature = (capsule, /))]
pub(crate) fn dlpack_facts(py: Python<'_>, capsule: &Bound<'_, PyCapsule>) -> PyResult<DlpackFacts> {
    enter::attached(py, || read_capsule(capsule))
}

fn read_capsule(capsule: &Bound<'_, PyCapsule>) -> Result<DlpackFacts> {
    if capsule.is_valid_checked(Some(VERSIONED)) {
        let managed = checked(capsule, VERSIONED)?.cast::<DlVersioned>();
        // SAFETY: a capsule of this name holds this struct, alive as long as the capsule; these two
        // fields lie at the same place in every version.
        let major = unsafe { (*managed).major };
        if major != DLPACK_MAJOR {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "dlpack",
                format!("the tensor speaks DLPack `{major}`"),
            )
            .with_hint("pdkv reads DLPack 1: export with `max_version=(1, 1)`"));
        }
        // SAFETY: the major version says that the struct is laid out as above.
        let flags = unsafe { (*managed).flags };
        // SAFETY: as for `flags`; the capsule outlives the borrow.
        let tensor = unsafe { &(*managed).tensor };
        return facts(tensor, flags & DLPACK_READ_ONLY != 0);
    }
    let managed = checked(capsule, PLAIN)?.cast::<DlTensor>();
    // SAFETY: a capsule of this name begins with this struct, alive as long as the capsule.
    facts(unsafe { &*managed }, false)
}

fn checked(capsule: &Bound<'_, PyCapsule>, name: &'static CStr) -> Result<*mut c_void> {
    capsule
        .pointer_checked(Some(name))
        .map(ptr::NonNull::as_ptr)
        .map_err(|_| {
            Error::new(
                ErrorKind::Unsupported,
                "dlpack",
                "the capsule holds no tensor, or it was consumed already",
            )
            .with_hint("`__dlpack__()` must return a fresh capsule")
        })
}

fn facts(tensor: &DlTensor, readonly: bool) -> Result<DlpackFacts> {
    let refuse = |what: String| Err(Error::new(ErrorKind::Layout, "dlpack", what));
    let Ok(ndim) = usize::try_from(tensor.ndim) else {
        return refuse(format!("the tensor has `{}` dimensions", tensor.ndim));
    };
    if !tensor.bits.is_multiple_of(8) || tensor.bits == 0 || tensor.lanes == 0 {
        return refuse(format!(
            "the elements are `{}` bits in `{}` lanes",
            tensor.bits, tensor.lanes
        ));
    }
    let itemsize = u64::from(tensor.bits / 8) * u64::from(tensor.lanes);
    let address = (tensor.data.addr() as u64).checked_add(tensor.byte_offset);
    let Some(address) = address else {
        return refuse("the byte offset is past the end of memory".to_owned());
    };
    let Some(shape) = longs(tensor.shape, ndim) else {
        return refuse("the tensor has no shape".to_owned());
    };
    let strides = longs(tensor.strides, ndim).map(|steps| {
        steps
            .into_iter()
            .map(|step| step.saturating_mul(itemsize.cast_signed()))
            .collect()
    });
    let dtype = if tensor.lanes == 1 {
        dtype(tensor.code, tensor.bits)
    } else {
        "raw".to_owned()
    };
    Ok((address, shape, strides, itemsize, dtype, readonly))
}

fn longs(values: *const i64, count: usize) -> Option<Vec<i64>> {
    if count == 0 {
        return Some(Vec::new());
    }
    if values.is_null() {
        return None;
    }
    // SAFETY: dlpack.h promises `ndim` values behind a pointer that is not null.
    Some(unsafe { std::slice::from_raw_parts(values, count) }.to_vec())
}

/// The names of dlpack.h's type codes, as pdkv writes them.
fn dtype(code: u8, bits: u8) -> String {
    match code {
        0 => format!("int{bits}"),
        1 => format!("uint{bits}"),
        2 => format!("float{bits}"),
        4 => "bfloat16".to_owned(),
        6 => "bool".to_owned(),
        10 => "float8_e4m3fn".to_owned(),
        11 => "float8_e4m3fnuz".to_owned(),
        12 => "float8_e5m2".to_owned(),
        13 => "float8_e5m2fnuz".to_owned(),
        _ => "raw".to_owned(),
    }
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
