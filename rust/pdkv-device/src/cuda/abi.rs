//! The driver's functions, types and constants that are used, as `cuda.h` declares them.
//!
//! Names carry the version suffix under which the library exports them. All of them are there, with these signatures, in every
//! driver of CUDA 12 and 13; `libcuda.so.1` keeps old names for ever.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::object::functions;

pub(super) type CuDevice = c_int;
pub(super) type CuContext = *mut c_void;
pub(super) type CuModule = *mut c_void;
pub(super) type CuFunction = *mut c_void;
pub(super) type CuStream = *mut c_void;
pub(super) type CuEvent = *mut c_void;
pub(super) type CuPointer = u64;

/// `CUipcMemHandle`, which calls take by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CuIpcMemHandle {
    pub(super) reserved: [u8; 64],
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
        fn cuDevicePrimaryCtxRetain(*mut CuContext, CuDevice) -> c_int;
        fn cuDevicePrimaryCtxRelease_v2(CuDevice) -> c_int;
        fn cuCtxPushCurrent_v2(CuContext) -> c_int;
        fn cuCtxPopCurrent_v2(*mut CuContext) -> c_int;
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
        fn cuStreamCreate(*mut CuStream, c_uint) -> c_int;
        fn cuStreamDestroy_v2(CuStream) -> c_int;
        fn cuStreamSynchronize(CuStream) -> c_int;
        fn cuStreamQuery(CuStream) -> c_int;
        fn cuStreamWaitEvent(CuStream, CuEvent, c_uint) -> c_int;
        fn cuEventCreate(*mut CuEvent, c_uint) -> c_int;
        fn cuEventDestroy_v2(CuEvent) -> c_int;
        fn cuEventRecord(CuEvent, CuStream) -> c_int;
        fn cuEventQuery(CuEvent) -> c_int;
        fn cuEventSynchronize(CuEvent) -> c_int;
        fn cuMemAlloc_v2(*mut CuPointer, usize) -> c_int;
        fn cuMemFree_v2(CuPointer) -> c_int;
        fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> c_int;
        fn cuMemFreeHost(*mut c_void) -> c_int;
        fn cuMemcpyAsync(CuPointer, CuPointer, usize, CuStream) -> c_int;
        fn cuMemsetD8Async(CuPointer, u8, usize, CuStream) -> c_int;
        fn cuPointerGetAttributes(c_uint, *const c_int, *const *mut c_void, CuPointer) -> c_int;
        fn cuIpcGetMemHandle(*mut CuIpcMemHandle, CuPointer) -> c_int;
        fn cuIpcOpenMemHandle_v2(*mut CuPointer, CuIpcMemHandle, c_uint) -> c_int;
        fn cuIpcCloseMemHandle(CuPointer) -> c_int;
    }
}

pub(super) const CUDA_ERROR_NO_DEVICE: c_int = 100;
pub(super) const CUDA_ERROR_NOT_READY: c_int = 600;

pub(super) const CU_STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const CU_EVENT_DISABLE_TIMING: c_uint = 2;
pub(super) const CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
pub(super) const CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;

/// Numbers of `CUdevice_attribute`.
pub(super) mod device {
    use std::ffi::c_int;

    pub(crate) const MULTIPROCESSOR_COUNT: c_int = 16;
    pub(crate) const MAX_THREADS_PER_MULTIPROCESSOR: c_int = 39;
    pub(crate) const UNIFIED_ADDRESSING: c_int = 41;
    pub(crate) const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    pub(crate) const COMPUTE_CAPABILITY_MINOR: c_int = 76;
    pub(crate) const MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: c_int = 81;
    pub(crate) const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
}

/// Numbers of `CUpointer_attribute`.
pub(super) mod pointer {
    use std::ffi::c_int;

    pub(crate) const MEMORY_TYPE: c_int = 2;
    pub(crate) const IS_MANAGED: c_int = 8;
    pub(crate) const DEVICE_ORDINAL: c_int = 9;
    pub(crate) const IS_LEGACY_CUDA_IPC_CAPABLE: c_int = 10;
    pub(crate) const RANGE_START_ADDR: c_int = 11;
    pub(crate) const RANGE_SIZE: c_int = 12;

    /// Values of `MEMORY_TYPE`.
    pub(crate) const HOST: u32 = 1;
    pub(crate) const DEVICE: u32 = 2;
    pub(crate) const UNIFIED: u32 = 4;
}

/// Every constant by its name in `cuda.h`, for the comparison.
#[cfg(test)]
pub(super) const CONSTANTS: &[(&str, i128)] = &[
    ("CUDA_ERROR_NO_DEVICE", CUDA_ERROR_NO_DEVICE as i128),
    ("CUDA_ERROR_NOT_READY", CUDA_ERROR_NOT_READY as i128),
    ("CU_STREAM_NON_BLOCKING", CU_STREAM_NON_BLOCKING as i128),
    ("CU_EVENT_DISABLE_TIMING", CU_EVENT_DISABLE_TIMING as i128),
    (
        "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS",
        CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as i128,
    ),
    (
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as i128,
    ),
    (
        "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
        device::MULTIPROCESSOR_COUNT as i128,
    ),
    (
        "CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR",
        device::MAX_THREADS_PER_MULTIPROCESSOR as i128,
    ),
    (
        "CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING",
        device::UNIFIED_ADDRESSING as i128,
    ),
    (
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
        device::COMPUTE_CAPABILITY_MAJOR as i128,
    ),
    (
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
        device::COMPUTE_CAPABILITY_MINOR as i128,
    ),
    (
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
        device::MAX_SHARED_MEMORY_PER_MULTIPROCESSOR as i128,
    ),
    (
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
        device::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as i128,
    ),
    ("CU_POINTER_ATTRIBUTE_MEMORY_TYPE", pointer::MEMORY_TYPE as i128),
    ("CU_POINTER_ATTRIBUTE_IS_MANAGED", pointer::IS_MANAGED as i128),
    ("CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL", pointer::DEVICE_ORDINAL as i128),
    (
        "CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE",
        pointer::IS_LEGACY_CUDA_IPC_CAPABLE as i128,
    ),
    (
        "CU_POINTER_ATTRIBUTE_RANGE_START_ADDR",
        pointer::RANGE_START_ADDR as i128,
    ),
    ("CU_POINTER_ATTRIBUTE_RANGE_SIZE", pointer::RANGE_SIZE as i128),
    ("CU_MEMORYTYPE_HOST", pointer::HOST as i128),
    ("CU_MEMORYTYPE_DEVICE", pointer::DEVICE as i128),
    ("CU_MEMORYTYPE_UNIFIED", pointer::UNIFIED as i128),
    ("sizeof(CUipcMemHandle)", size_of::<CuIpcMemHandle>() as i128),
];
