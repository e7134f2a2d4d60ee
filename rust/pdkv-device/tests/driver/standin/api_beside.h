// What pdkv does not call and UCX's module for CUDA does, and what pdkv calls for UCX's sake: so that the two meet over one stand-in.
#pragma once

#include "api_virtual.h"

namespace {

// What UCX asks for at most to learn that it is not to be had.
constexpr int NOT_SUPPORTED = 801;

}  // namespace

API cuCtxGetCurrent(void **context) {
    CALL(cuCtxGetCurrent);
    *context = entered.empty() ? nullptr : entered.back();
    return 0;
}
API cuCtxGetDevice(int *device) {
    CALL_IN_CONTEXT(cuCtxGetDevice);
    *device = settings.ordinal(entered.back()->device);
    return 0;
}
API cuCtxGetId(void *context, unsigned long long *id) {
    CALL(cuCtxGetId);
    if (!context && entered.empty()) return 201;
    *id = 1 + (context ? static_cast<Context *>(context) : entered.back())->device;
    return 0;
}
API cuDeviceGetUuid(unsigned char *uuid, int ordinal) {
    CALL(cuDeviceGetUuid);
    std::memcpy(uuid, "stand-in of GPU ", 16);
    uuid[15] = static_cast<unsigned char>('0' + settings.visible[ordinal]);
    return 0;
}
API cuDeviceTotalMem_v2(std::size_t *bytes, int) {
    CALL(cuDeviceTotalMem_v2);
    *bytes = std::size_t{1} << 37;
    return 0;
}
API cuMemcpyDtoDAsync_v2(u64 dst, u64 src, std::size_t bytes, void *stream) {
    return cuMemcpyAsync(dst, src, bytes, stream);
}
API cuMemcpyHtoD_v2(u64 dst, const void *src, std::size_t bytes) {
    const int status = cuMemcpyAsync(dst, reinterpret_cast<u64>(src), bytes, nullptr);
    return status ? status : cuStreamSynchronize(nullptr);
}
API cuPointerSetAttribute(const void *, int, u64 address) {
    CALL(cuPointerSetAttribute);
    return find(address) ? 0 : 1;
}
// Whoever wants to be called does not ask after the stream any more: what is left in it is done now.
API cuStreamAddCallback(void *handle, void (*call)(void *, int, void *), void *data, unsigned) {
    {
        CALL_IN_CONTEXT(cuStreamAddCallback);
        const StreamPtr stream = stream_of(handle);
        if (!stream) return 400;
        progress(guard, stream, stream->asked);
    }
    call(handle, 0, data);
    return 0;
}
// What adapters have written is visible: this memory is the host's, and has no other way.
API cuFlushGPUDirectRDMAWrites(int target, int scope) {
    CALL_IN_CONTEXT(cuFlushGPUDirectRDMAWrites);
    return target == 0 && (scope == 100 || scope == 200) ? 0 : 1;
}
API cuMemAllocManaged(u64 *, std::size_t, unsigned) { return NOT_SUPPORTED; }
API cuMemRangeGetAttribute(void *, std::size_t, int, u64, std::size_t) { return NOT_SUPPORTED; }
API cuMemPoolDestroy(void *) { return NOT_SUPPORTED; }
API cuMemPoolExportPointer(void *, u64) { return NOT_SUPPORTED; }
API cuMemPoolExportToShareableHandle(void *, void *, int, u64) { return NOT_SUPPORTED; }
API cuMemPoolImportFromShareableHandle(void **, void *, int, u64) { return NOT_SUPPORTED; }
API cuMemPoolImportPointer(u64 *, void *, void *) { return NOT_SUPPORTED; }
API cuMemPoolSetAccess(void *, const void *, std::size_t) { return NOT_SUPPORTED; }
