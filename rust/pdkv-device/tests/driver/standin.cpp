// A stand-in for libcuda.so.1: the driver's functions over host memory, with the kernels compiled for the host.
//
// What a stream is asked happens when somebody waits for it or asks after it, unless it is told to do all at once, so that a missing wait shows,
// between streams too; device memory is out of the CPU's reach except while the device runs; and other processes can be given it. It answers misuse as the driver does,
// counts what is alive and how often it was called, and fails where it is told to. What it is told to be: standin/state.h.

#include "standin/api_beside.h"

#include <utility>

#ifndef STANDIN_BARE
#include "entries.h"
#endif

namespace {

struct Function {
    std::size_t entry;
    int shared;
    std::string name;
};
struct Module {
    std::map<std::string, Function> functions;
};

}  // namespace

API cuInit(unsigned flags) {
    std::unique_lock<std::mutex> guard(lock);
    if (process && process != getpid()) return 3;
    if (flags) return 1;
    ++alive["calls cuInit"];
    char thread[16] = "";
    pthread_getname_np(pthread_self(), thread, sizeof thread);
    ++alive[std::string("calls cuInit by ") + thread];
    if (const int status = failing("cuInit")) return status;
    if (settings.init) return settings.init;
    if (settings.visible.empty()) return 100;  // CUDA_ERROR_NO_DEVICE
    process = getpid();
    return 0;
}
API cuDriverGetVersion(int *version) {
    *version = settings.version;
    return 0;
}
API cuGetErrorName(int status, const char **name) {
    *name = status == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_STAND_IN";
    return status == 777 ? 1 : 0;
}
API cuGetErrorString(int status, const char **text) {
    *text = status == 777 ? nullptr : "words of the stand-in";
    return 0;
}
API cuDeviceGetCount(int *count) {
    CALL(cuDeviceGetCount);
    *count = static_cast<int>(settings.visible.size());
    return 0;
}
API cuDeviceGet(int *device, int ordinal) {
    CALL(cuDeviceGet);
    *device = ordinal;
    return ordinal < static_cast<int>(settings.visible.size()) ? 0 : 101;
}
API cuDeviceGetName(char *name, int room, int) {
    CALL(cuDeviceGetName);
    std::strncpy(name, settings.name.c_str(), room);
    return 0;
}
API cuDeviceGetUuid_v2(unsigned char *uuid, int ordinal) {
    CALL(cuDeviceGetUuid_v2);
    std::memcpy(uuid, "stand-in of GPU ", 16);
    uuid[15] = static_cast<unsigned char>('0' + settings.visible[ordinal]);
    return 0;
}
API cuDeviceGetAttribute(int *value, int attribute, int ordinal) {
    CALL(cuDeviceGetAttribute);
    if (attribute == 33) {  // the PCI bus
        *value = 1 + ordinal;
        return 0;
    }
    static const std::map<int, int> values = {{16, settings.multiprocessors}, {38, 1 << 20}, {39, 2048}, {115, settings.pools}, {41, 1}, {75, settings.major}, {76, 0}, {99, 1},
                                              {110, 1}, {81, 228 << 10}, {97, 227 << 10}, {102, settings.vmm},
                                              {113, 1}, {103, settings.vmm}, {34, 0}, {50, 0}, {116, 0}, {124, 0},
                                              {117, settings.flush}, {118, settings.ordering}};
    const auto found = values.find(attribute);
    if (found == values.end()) return 1;
    *value = found->second;
    return 0;
}
API cuDeviceCanAccessPeer(int *can, int ordinal, int other) {
    CALL(cuDeviceCanAccessPeer);
    *can = ordinal != other && settings.peers;
    return 0;
}
API cuDevicePrimaryCtxRetain(void **context, int ordinal) {
    CALL(cuDevicePrimaryCtxRetain);
    const int device = settings.visible[ordinal];
    contexts[device].device = device;
    ++contexts[device].retained;
    ++alive["contexts"];
    *context = &contexts[device];
    return 0;
}
API cuDevicePrimaryCtxGetState(int ordinal, unsigned *flags, int *active) {
    CALL(cuDevicePrimaryCtxGetState);
    const auto found = contexts.find(settings.visible[ordinal]);
    *flags = 0, *active = found != contexts.end() && found->second.retained > 0;
    return 0;
}
API cuDevicePrimaryCtxRelease_v2(int ordinal) {
    CALL(cuDevicePrimaryCtxRelease_v2);
    --contexts[settings.visible[ordinal]].retained;
    --alive["contexts"];
    return 0;
}
API cuCtxPushCurrent_v2(void *context) {
    std::unique_lock<std::mutex> guard(lock);
    ++alive["calls cuCtxPushCurrent_v2"];
    Context *pushed = static_cast<Context *>(context);
    if (pushed->retained == 0) return 201;
    entered.push_back(pushed);
    return 0;
}
API cuCtxPopCurrent_v2(void **context) {
    std::unique_lock<std::mutex> guard(lock);
    ++alive["calls cuCtxPopCurrent_v2"];
    if (entered.empty()) return 201;
    if (context) *context = entered.back();
    entered.pop_back();
    return 0;
}
API cuCtxEnablePeerAccess(void *context, unsigned flags) {
    CALL_IN_CONTEXT(cuCtxEnablePeerAccess);
    const int device = entered.back()->device, other = static_cast<Context *>(context)->device;
    if (flags || device == other) return 101;
    if (!settings.peers) return 217;
    return peers.insert({device, other}).second ? 0 : 704;
}
API cuModuleLoadData(void **module, const void *image) {
    CALL_IN_CONTEXT(cuModuleLoadData);
    if (std::memcmp(image, "\x7f" "ELFstand-in", 12) != 0) return 200;  // CUDA_ERROR_INVALID_IMAGE
    *module = new Module;
    ++alive["modules"];
    return 0;
}
API cuModuleUnload(void *module) {
    CALL_IN_CONTEXT(cuModuleUnload);
    delete static_cast<Module *>(module);
    --alive["modules"];
    return 0;
}
API cuModuleGetFunction(void **function, void *module, const char *name) {
    CALL_IN_CONTEXT(cuModuleGetFunction);
#ifndef STANDIN_BARE
    for (std::size_t at = 0; at < sizeof ENTRIES / sizeof *ENTRIES; ++at) {
        if (ENTRIES[at].name == std::string(name)) {
            *function = &static_cast<Module *>(module)->functions.try_emplace(name, Function{at, 48 << 10, name}).first->second;
            return 0;
        }
    }
#endif
    (void)function, (void)module, (void)name;
    return 500;  // CUDA_ERROR_NOT_FOUND
}
API cuFuncSetAttribute(void *function, int attribute, int value) {
    CALL_IN_CONTEXT(cuFuncSetAttribute);
    if (attribute != 8 || value > 227 << 10) return 1;
    static_cast<Function *>(function)->shared = value;
    return 0;
}
API cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    CALL_IN_CONTEXT(cuLaunchKernel);
    const Function found = *static_cast<Function *>(function);
    if (!gx || gy != 1 || gz != 1 || !bx || by != 1 || bz != 1 || bx > 1024 || extra) return 1;
    if (static_cast<int>(shared) > found.shared) return 1;
    ++alive["launches"];
    ++alive["launches " + found.name];
    alive["blocks"] += gx;
#ifndef STANDIN_BARE
    pdkv::View view;
    std::memcpy(&view, arguments[0], sizeof view);
    if (view.flag && failing("flag")) view.flag = nullptr;
    const bool slow = !settings.slow.empty() && found.name.find(settings.slow) != std::string::npos;
    Stream *const clock = stream_of(stream).get();
    if (!clock) return 400;
    const auto launch = [=] {
        if (slow) clock->pretended_ms += SLOW_MS;
        gridDim.x = gx;
        blockDim.x = bx;
        for (blockIdx.x = 0; blockIdx.x < gx; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < bx; ++threadIdx.x) ENTRIES[found.entry].run(view);
    };
    return ask(stream, launch, found.name);
#else
    (void)stream, (void)arguments;
    return 0;
#endif
}

// For tests alone. What is alive, how often each call was made, and how deep this thread stands in contexts, as `name=count` a line.
extern "C" __attribute__((visibility("default"))) const char *standin_report() {
    std::unique_lock<std::mutex> guard(lock);
    report = "depth=" + std::to_string(entered.size()) + "\n";
    for (const auto &[name, count] : alive) report += name + "=" + std::to_string(count) + "\n";
    return report.c_str();
}
// 1: nothing that is asked happens, and who waits is kept; 2: no kernel runs; 0: as ever.
API standin_hold(int hold) {
    std::unique_lock<std::mutex> guard(lock);
    settings.hold = hold;
    catch_up();
    released.notify_all();
    return 0;
}
// 1: what is asked happens at once; 0: when somebody waits or asks.
API standin_eager(int eager) {
    std::unique_lock<std::mutex> guard(lock);
    settings.eager = eager;
    catch_up();
    return 0;
}
// Makes the `nth` coming call of a name return a status, 0 for every one. Also `run`, a step on the device, after which every call returns the
// status; `wrong`, a launch that writes one wrong byte, or `wrong NAME`, one of the kernel of that name; and `flag`, a launch that raises no flag.
API standin_fail(const char *call, int nth, int status) {
    std::unique_lock<std::mutex> guard(lock);
    fail(call, nth, status);
    return 0;
}
// Somebody captures a graph (1) or no longer (0), of a stream if one is named.
API standin_capture(u64 stream, int on) {
    std::unique_lock<std::mutex> guard(lock);
    capturing = on;
    const auto found = streams.find(at(stream));
    if (found != streams.end()) found->second->captured = on;
    return 0;
}
// No more failures, and what was pinned before is no longer the most.
API standin_reset() {
    std::unique_lock<std::mutex> guard(lock);
    failures.clear();
    alive["most pinned bytes"] = alive["pinned bytes"];
    // What was asked in a dead context never happens.
    if (sticky)
        for (const auto &[handle, stream] : streams) stream->steps.clear(), stream->done = stream->asked;
    return std::exchange(sticky, 0);
}
// Memory as an allocator with expandable segments makes it: `count` allocations of `granules` x 2 MiB, mapped side by side, that allow `types`
// of handles. 0 where it can't be.
extern "C" __attribute__((visibility("default"))) u64 standin_segments(int ordinal, int count, int granules, int types) {
    const std::size_t bytes = granules * GRANULARITY;
    u64 address = 0;
    if (cuMemAddressReserve(&address, count * bytes, 0, 0, 0)) return 0;
    const Access access = {1, ordinal, 3};
    for (int at = 0; at < count; ++at) {
        const Properties properties = {1, types, 1, ordinal, nullptr, 0, 0, 0, {}};
        u64 handle = 0;
        if (cuMemCreate(&handle, bytes, &properties, 0) || cuMemMap(address + at * bytes, bytes, 0, handle, 0)) return 0;
        cuMemRelease(handle);
    }
    return cuMemSetAccess(address, count * bytes, &access, 1) ? 0 : address;
}
// Puts other memory at the addresses of one segment, or of one allocation, as an allocator does that gives memory back and takes some again.
extern "C" __attribute__((visibility("default"))) int standin_replace(u64 address) {
    std::unique_lock<std::mutex> guard(lock);
    Mapping *mapping = find(address);
    if (!mapping || (mapping->kind != Kind::Laid && mapping->kind != Kind::Alloc)) return 1;
    const Mapping old = *mapping;
    const BlockPtr block = make_block(old.block->device, old.block->bytes, old.block->types);
    unmap(old.start);
    Mapping *fresh = map_block(block, old.bytes, old.kind, old.devices, old.start);
    if (old.kind == Kind::Laid) fresh->handle = next_handle++;
    return 0;
}
// Memory of a pool (`cudaMallocAsync`) or, with `managed`, such that the driver moves.
extern "C" __attribute__((visibility("default"))) u64 standin_other(int ordinal, u64 bytes, int managed) {
    std::unique_lock<std::mutex> guard(lock);
    const int device = settings.visible[ordinal];
    const BlockPtr block = make_block(device, bytes, 0);
    const Mapping *mapping = map_block(block, bytes, managed ? Kind::Managed : Kind::Pool, {device});
    return mapping ? mapping->start : 0;
}
