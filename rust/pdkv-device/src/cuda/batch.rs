//! Many copies by one call, which drivers of CUDA 12.8 and later have.
//!
//! The call changed in CUDA 13: its older form also tells which copy it did not like. A driver gives each caller the form of the release that
//! the caller names.

use std::ffi::{c_int, c_void};

use pdkv_core::{Error, ErrorKind, Result};

use super::abi::{CuMemLocation, CuMemcpyAttributes, CuPointer, CuStream};
use super::context::Context;
use super::driver::Driver;
use super::numbers as n;
use super::stream::Stream;

/// As in the headers of CUDA 12.8 and 12.9.
pub(super) type BatchOf12 = unsafe extern "C" fn(
    *mut CuPointer,
    *mut CuPointer,
    *mut usize,
    usize,
    *mut CuMemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    CuStream,
) -> c_int;

/// As in the headers of CUDA 13.
pub(super) type BatchOf13 = unsafe extern "C" fn(
    *mut CuPointer,
    *mut CuPointer,
    *mut usize,
    usize,
    *mut CuMemcpyAttributes,
    *mut usize,
    usize,
    CuStream,
) -> c_int;

/// The form that the driver has.
#[derive(Clone, Copy)]
pub(super) enum Batch {
    Absent,
    Of12(BatchOf12),
    Of13(BatchOf13),
}

impl Batch {
    pub(super) fn find(driver: &Driver) -> Self {
        let (version, release) = match driver.version() {
            (major, _) if major >= 13 => (13_000, 13),
            version if version >= (12, 8) => (12_080, 12),
            _ => return Self::Absent,
        };
        let (mut function, mut found) = (std::ptr::null_mut::<c_void>(), -1);
        let ask = driver.functions().cuGetProcAddress_v2;
        // SAFETY: a C string, a pointer and a number of ours to write to.
        let status = unsafe {
            ask(
                c"cuMemcpyBatchAsync".as_ptr(),
                &raw mut function,
                version,
                n::CU_GET_PROC_ADDRESS_DEFAULT,
                &raw mut found,
            )
        };
        if status != 0 || found != n::CU_GET_PROC_ADDRESS_SUCCESS || function.is_null() {
            return Self::Absent;
        }
        if release == 13 {
            // SAFETY: the form of the release that was named.
            Self::Of13(unsafe { std::mem::transmute::<*mut c_void, BatchOf13>(function) })
        } else {
            // SAFETY: the form of the release that was named.
            Self::Of12(unsafe { std::mem::transmute::<*mut c_void, BatchOf12>(function) })
        }
    }
}

/// Whether the driver of a context copies in batches.
pub fn has_batch(context: &Context) -> bool {
    !matches!(context.driver().batch(), Batch::Absent)
}

/// Copies between any memory that the driver reaches, in the order of the stream; the copies of one batch happen in any order. Does not wait,
/// and copies the lists before it returns.
///
/// # Errors
/// `Unsupported` when the driver has no such call, or the stream is the default one; `Layout` for lists of different lengths; `Device` when
/// the driver fails.
///
/// # Safety
/// All ranges must be live, and nobody else may use them in a conflicting way, until the stream has passed the batch. No destination
/// may overlap another range of the batch.
pub unsafe fn copy_batch_async(stream: &Stream, dsts: &[u64], srcs: &[u64], sizes: &[usize]) -> Result<()> {
    const COPY: &str = "copy in batches";
    let count = sizes.len();
    if dsts.len() != count || srcs.len() != count {
        let message = format!(
            "`{}` destinations, `{}` sources, `{count}` sizes",
            dsts.len(),
            srcs.len()
        );
        return Err(Error::new(ErrorKind::Layout, COPY, message));
    }
    if stream.handle().is_null() {
        let message = "the driver takes no batch on the default stream";
        return Err(Error::new(ErrorKind::Unsupported, COPY, message));
    }
    if count == 0 {
        return Ok(());
    }
    let context = stream.context();
    let nowhere = CuMemLocation::default();
    let mut attributes = CuMemcpyAttributes {
        src_access_order: n::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        src_location_hint: nowhere,
        dst_location_hint: nowhere,
        flags: 0,
    };
    let (mut first, mut failed) = (0, usize::MAX);
    let (dsts, srcs, sizes) = (
        dsts.as_ptr().cast_mut(),
        srcs.as_ptr().cast_mut(),
        sizes.as_ptr().cast_mut(),
    );
    let (attributes, first) = (&raw mut attributes, &raw mut first);
    let _entered = context.enter()?;
    let status = match context.driver().batch() {
        Batch::Absent => {
            let (major, minor) = context.driver().version();
            let message =
                format!("a driver of CUDA `{major}.{minor}` has no batched copies, those of 12.8 and later do");
            return Err(Error::new(ErrorKind::Unsupported, COPY, message));
        }
        Batch::Of12(call) => {
            let failed = &raw mut failed;
            // SAFETY: lists of `count`, one set of attributes from copy 0 on, and a number to write to; the driver only reads the lists,
            // and the ranges are as the caller promises.
            unsafe { call(dsts, srcs, sizes, count, attributes, first, 1, failed, stream.handle()) }
        }
        Batch::Of13(call) => {
            // SAFETY: lists of `count` and one set of attributes from copy 0 on; the driver only reads them, and the ranges are as the
            // caller promises.
            unsafe { call(dsts, srcs, sizes, count, attributes, first, 1, stream.handle()) }
        }
    };
    let checked = context.driver().check("cuMemcpyBatchAsync", status);
    checked.map_err(|error| match failed {
        usize::MAX => error,
        failed => error.with("copy", failed),
    })
}
