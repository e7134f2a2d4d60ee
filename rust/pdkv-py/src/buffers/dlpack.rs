//! DLPack: reading a capsule of somebody else's memory, and making one of a pool's.
//!
//! A capsule that is read is not consumed: it is kept for as long as the memory is used, and lets go of it when it is
//! collected. One that is made holds the pool until whoever takes it calls the deleter, or nobody has taken it.

use std::ffi::{CStr, c_void};
use std::ptr;

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Memory;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

use super::Held;
use crate::enter;

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

/// `DLManagedTensor` of dlpack.h.
#[repr(C)]
struct DlManaged {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// The two structs that a capsule may hold.
trait Managed: Sized {
    const NAME: &'static CStr;
    fn of(tensor: DlTensor) -> Self;
}

impl Managed for DlManaged {
    const NAME: &'static CStr = PLAIN;

    fn of(tensor: DlTensor) -> Self {
        Self {
            tensor,
            context: ptr::null_mut(),
            deleter: Some(release::<Self>),
        }
    }
}

impl Managed for DlVersioned {
    const NAME: &'static CStr = VERSIONED;

    fn of(tensor: DlTensor) -> Self {
        Self {
            major: DLPACK_MAJOR,
            minor: 0,
            context: ptr::null_mut(),
            deleter: Some(release::<Self>),
            flags: 0,
            tensor,
        }
    }
}

/// What a capsule of ours points to. The struct comes first: whoever takes it knows only that.
#[repr(C)]
struct Holder<M> {
    managed: M,
    axis: Box<[i64; 2]>,
    memory: Held,
}

/// The DLPack device of memory: its type and number.
pub(crate) fn dlpack_device(memory: &Memory) -> (i32, i32) {
    match memory {
        Memory::Host(_) => (1, 0),
        // An ordinal that the driver gave as a C integer.
        Memory::Device(region) => (2, region.gpu().ordinal().cast_signed()),
    }
}

/// A capsule of all bytes of a pool's memory, as `uint8`; it keeps them.
pub(crate) fn lend_dlpack(py: Python<'_>, memory: Memory, versioned: bool) -> PyResult<Bound<'_, PyAny>> {
    if versioned {
        wrap::<DlVersioned>(py, memory)
    } else {
        wrap::<DlManaged>(py, memory)
    }
}

fn wrap<M: Managed>(py: Python<'_>, memory: Memory) -> PyResult<Bound<'_, PyAny>> {
    let (device_type, device_id) = dlpack_device(&memory);
    let axis = Box::new([memory.len().cast_signed(), 1]);
    let tensor = DlTensor {
        data: ptr::with_exposed_provenance_mut(memory.address() as usize),
        device_type,
        device_id,
        ndim: 1,
        code: 1,
        bits: 8,
        lanes: 1,
        shape: &raw const axis[0],
        strides: &raw const axis[1],
        byte_offset: 0,
    };
    let holder = Box::into_raw(Box::new(Holder {
        managed: M::of(tensor),
        axis,
        memory: Held::new(memory),
    }));
    // SAFETY: a pointer that is not null, a static name, and a destructor for what the pointer leads to.
    let capsule = unsafe { ffi::PyCapsule_New(holder.cast(), M::NAME.as_ptr(), Some(unclaimed::<M>)) };
    // SAFETY: a new reference, or null with an exception set. Then the holder is lost, for want of the memory to say so.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// The deleter: whoever took the capsule's struct is done with it.
///
/// # Safety
/// `managed` must be of a capsule of ours, and this is the only call for it.
unsafe extern "C" fn release<M>(managed: *mut M) {
    // SAFETY: the struct is the first field of a holder that `wrap` boxed, and is given up once.
    drop(unsafe { Box::from_raw(managed.cast::<Holder<M>>()) });
}

/// The capsule's destructor: gives up what nobody has taken. Who takes it renames the capsule.
///
/// # Safety
/// Called by Python only, with the capsule that dies.
unsafe extern "C" fn unclaimed<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule, and a static name.
    if unsafe { ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: a capsule of that name, as just seen.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()) };
    // SAFETY: `wrap` made it, and nobody took it.
    unsafe { release::<M>(managed.cast()) };
}
