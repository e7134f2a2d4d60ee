//! The driver's functions and types that are used, as `cuda.h` declares them; its numbers are in `numbers.rs`.
//!
//! Names carry the version suffix under which the library exports them. All of the table is there, with these signatures, in
//! every driver of CUDA 12 and 13; `libcuda.so.1` keeps old names for ever. What newer drivers alone have is asked for by
//! `cuGetProcAddress` (`batch.rs`).

use std::ffi::{c_char, c_int, c_uint, c_void};
#[cfg(test)]
use std::mem::offset_of;

use crate::object::functions;

pub(super) type CuDevice = c_int;
pub(super) type CuContext = *mut c_void;
pub(super) type CuModule = *mut c_void;
pub(super) type CuFunction = *mut c_void;
pub(super) type CuStream = *mut c_void;
pub(super) type CuEvent = *mut c_void;
pub(super) type CuPointer = u64;
pub(super) type CuMemHandle = u64;

/// `CUipcMemHandle`, which calls take by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CuIpcMemHandle {
    pub(super) reserved: [u8; 64],
}

/// `CUuuid`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct CuUuid {
    pub(super) bytes: [u8; 16],
}

/// `CUmemLocation`, the one form that is used: a device by its number.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct CuMemLocation {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CuMemAllocationProp {
    pub(super) kind: c_int,
    pub(super) requested_handle_types: c_int,
    pub(super) location: CuMemLocation,
    pub(super) win32_handle_meta_data: *mut c_void,
    pub(super) compression_type: u8,
    pub(super) gpu_direct_rdma_capable: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CuMemAccessDesc {
    pub(super) location: CuMemLocation,
    pub(super) flags: c_int,
}

/// `CUmemcpyAttributes`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CuMemcpyAttributes {
    pub(super) src_access_order: c_int,
    pub(super) src_location_hint: CuMemLocation,
    pub(super) dst_location_hint: CuMemLocation,
    pub(super) flags: c_uint,
}

functions! {
    /// The functions of the driver.
    Functions {
        fn cuInit(c_uint) -> c_int;
        fn cuDriverGetVersion(*mut c_int) -> c_int;
        fn cuGetErrorName(c_int, *mut *const c_char) -> c_int;
        fn cuGetErrorString(c_int, *mut *const c_char) -> c_int;
        fn cuDeviceGetCount(*mut c_int) -> c_int;
        fn cuDeviceGet(*mut CuDevice, c_int) -> c_int;
        fn cuDeviceGetName(*mut c_char, c_int, CuDevice) -> c_int;
        fn cuDeviceGetAttribute(*mut c_int, c_int, CuDevice) -> c_int;
        fn cuDeviceGetUuid_v2(*mut CuUuid, CuDevice) -> c_int;
        fn cuDeviceCanAccessPeer(*mut c_int, CuDevice, CuDevice) -> c_int;
        fn cuCtxEnablePeerAccess(CuContext, c_uint) -> c_int;
        fn cuDevicePrimaryCtxRetain(*mut CuContext, CuDevice) -> c_int;
        fn cuDevicePrimaryCtxGetState(CuDevice, *mut c_uint, *mut c_int) -> c_int;
        fn cuDevicePrimaryCtxRelease_v2(CuDevice) -> c_int;
        fn cuCtxPushCurrent_v2(CuContext) -> c_int;
        fn cuCtxPopCurrent_v2(*mut CuContext) -> c_int;
        fn cuCtxSynchronize() -> c_int;
        fn cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int) -> c_int;
        fn cuThreadExchangeStreamCaptureMode(*mut c_int) -> c_int;
        fn cuFlushGPUDirectRDMAWrites(c_int, c_int) -> c_int;
        fn cuModuleLoadData(*mut CuModule, *const c_void) -> c_int;
        fn cuModuleUnload(CuModule) -> c_int;
        fn cuModuleGetFunction(*mut CuFunction, CuModule, *const c_char) -> c_int;
        fn cuFuncSetAttribute(CuFunction, c_int, c_int) -> c_int;
        fn cuLaunchKernel(
            CuFunction,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            CuStream,
            *mut *mut c_void,
            *mut *mut c_void,
        ) -> c_int;
        fn cuStreamCreateWithPriority(*mut CuStream, c_uint, c_int) -> c_int;
        fn cuStreamDestroy_v2(CuStream) -> c_int;
        fn cuStreamSynchronize(CuStream) -> c_int;
        fn cuStreamQuery(CuStream) -> c_int;
        fn cuStreamIsCapturing(CuStream, *mut c_int) -> c_int;
        fn cuStreamWaitEvent(CuStream, CuEvent, c_uint) -> c_int;
        fn cuStreamWriteValue64_v2(CuStream, CuPointer, u64, c_uint) -> c_int;
        fn cuEventCreate(*mut CuEvent, c_uint) -> c_int;
        fn cuEventDestroy_v2(CuEvent) -> c_int;
        fn cuEventRecord(CuEvent, CuStream) -> c_int;
        fn cuEventQuery(CuEvent) -> c_int;
        fn cuEventSynchronize(CuEvent) -> c_int;
        fn cuEventElapsedTime(*mut f32, CuEvent, CuEvent) -> c_int;
        fn cuMemAlloc_v2(*mut CuPointer, usize) -> c_int;
        fn cuMemFree_v2(CuPointer) -> c_int;
        fn cuMemAllocAsync(*mut CuPointer, usize, CuStream) -> c_int;
        fn cuMemFreeAsync(CuPointer, CuStream) -> c_int;
        fn cuMemGetInfo_v2(*mut usize, *mut usize) -> c_int;
        fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> c_int;
        fn cuMemFreeHost(*mut c_void) -> c_int;
        fn cuMemHostRegister_v2(*mut c_void, usize, c_uint) -> c_int;
        fn cuMemHostUnregister(*mut c_void) -> c_int;
        fn cuMemHostGetDevicePointer_v2(*mut CuPointer, *mut c_void, c_uint) -> c_int;
        fn cuMemcpyAsync(CuPointer, CuPointer, usize, CuStream) -> c_int;
        fn cuMemsetD8Async(CuPointer, u8, usize, CuStream) -> c_int;
        fn cuPointerGetAttribute(*mut c_void, c_int, CuPointer) -> c_int;
        fn cuPointerGetAttributes(c_uint, *const c_int, *const *mut c_void, CuPointer) -> c_int;
        fn cuMemGetAddressRange_v2(*mut CuPointer, *mut usize, CuPointer) -> c_int;
        fn cuMemAddressReserve(*mut CuPointer, usize, usize, CuPointer, u64) -> c_int;
        fn cuMemAddressFree(CuPointer, usize) -> c_int;
        fn cuMemCreate(*mut CuMemHandle, usize, *const CuMemAllocationProp, u64) -> c_int;
        fn cuMemRelease(CuMemHandle) -> c_int;
        fn cuMemMap(CuPointer, usize, usize, CuMemHandle, u64) -> c_int;
        fn cuMemUnmap(CuPointer, usize) -> c_int;
        fn cuMemSetAccess(CuPointer, usize, *const CuMemAccessDesc, usize) -> c_int;
        fn cuMemRetainAllocationHandle(*mut CuMemHandle, *mut c_void) -> c_int;
        fn cuMemGetAllocationGranularity(*mut usize, *const CuMemAllocationProp, c_int) -> c_int;
        fn cuMemGetAllocationPropertiesFromHandle(*mut CuMemAllocationProp, CuMemHandle) -> c_int;
        fn cuMemExportToShareableHandle(*mut c_void, CuMemHandle, c_int, u64) -> c_int;
        fn cuMemImportFromShareableHandle(*mut CuMemHandle, *mut c_void, c_int) -> c_int;
        fn cuGetProcAddress_v2(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;
        fn cuIpcGetMemHandle(*mut CuIpcMemHandle, CuPointer) -> c_int;
        fn cuIpcOpenMemHandle_v2(*mut CuPointer, CuIpcMemHandle, c_uint) -> c_int;
        fn cuIpcCloseMemHandle(CuPointer) -> c_int;
    }
}

/// The layout of every struct: expressions in C, and their values here.
#[cfg(test)]
pub(super) const LAYOUTS: &[(&str, i128)] = &[
    ("sizeof(CUipcMemHandle)", size_of::<CuIpcMemHandle>() as i128),
    ("sizeof(CUmemFabricHandle)", size_of::<CuIpcMemHandle>() as i128),
    ("sizeof(CUuuid)", size_of::<CuUuid>() as i128),
    ("sizeof(CUmemLocation)", size_of::<CuMemLocation>() as i128),
    ("offsetof(CUmemLocation, id)", offset_of!(CuMemLocation, id) as i128),
    ("sizeof(CUmemAllocationProp)", size_of::<CuMemAllocationProp>() as i128),
    (
        "offsetof(CUmemAllocationProp, requestedHandleTypes)",
        offset_of!(CuMemAllocationProp, requested_handle_types) as i128,
    ),
    (
        "offsetof(CUmemAllocationProp, location)",
        offset_of!(CuMemAllocationProp, location) as i128,
    ),
    (
        "offsetof(CUmemAllocationProp, allocFlags)",
        offset_of!(CuMemAllocationProp, compression_type) as i128,
    ),
    ("sizeof(CUmemAccessDesc)", size_of::<CuMemAccessDesc>() as i128),
    (
        "offsetof(CUmemAccessDesc, flags)",
        offset_of!(CuMemAccessDesc, flags) as i128,
    ),
    ("sizeof(CUmemcpyAttributes)", size_of::<CuMemcpyAttributes>() as i128),
    (
        "offsetof(CUmemcpyAttributes, srcLocHint)",
        offset_of!(CuMemcpyAttributes, src_location_hint) as i128,
    ),
    (
        "offsetof(CUmemcpyAttributes, dstLocHint)",
        offset_of!(CuMemcpyAttributes, dst_location_hint) as i128,
    ),
    (
        "offsetof(CUmemcpyAttributes, flags)",
        offset_of!(CuMemcpyAttributes, flags) as i128,
    ),
];
