// A stand-in for libcuda.so.1: the driver's functions over host memory, with the kernels compiled for the host.
//
// What a stream is asked happens at the next call that waits, in the order of the asking, so that a missing wait shows. It
// answers misuse as the driver does, counts what is alive, and is told at compile time what kind of driver to be.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#ifndef STANDIN_BARE
#include "entries.h"
#endif
#ifndef STANDIN_VERSION
#define STANDIN_VERSION 12040
#endif
#ifndef STANDIN_INIT
#define STANDIN_INIT 0
#endif
#ifndef STANDIN_DEVICES
#define STANDIN_DEVICES 2
#endif
#ifndef STANDIN_NAME
#define STANDIN_NAME "Stand-in H200"
#endif

#define API extern "C" __attribute__((visibility("default"))) int

namespace {

std::recursive_mutex lock;
using Guard = std::lock_guard<std::recursive_mutex>;

struct Context {
    int device, retained;
};
Context contexts[2];
thread_local std::vector<Context *> entered;

struct Stream {
    unsigned flags;
    std::size_t asked, done;
};
struct Event {
    Stream *stream;
    std::size_t at;
};
struct Function {
    std::size_t entry;
    int shared;
};

struct Module {
    std::map<std::string, Function> functions;
};

Stream default_stream;
std::vector<std::pair<Stream *, std::function<void()>>> queue;
std::map<std::uint64_t, std::size_t> device_memory, host_memory, mapped;
std::map<std::string, int> alive;
std::string report;

Stream *stream_of(void *handle) {
    return handle ? static_cast<Stream *>(handle) : &default_stream;
}
void ask(void *handle, std::function<void()> what) {
    Stream *stream = stream_of(handle);
    ++stream->asked;
    queue.push_back({stream, std::move(what)});
}
// Everything that was asked of anybody: no stream here overtakes another.
void run() {
    for (auto &[stream, what] : queue) {
        what();
        ++stream->done;
    }
    queue.clear();
}

}  // namespace

#define COUNT         \
    Guard guard(lock); \
    ++alive[std::string("calls ") + __func__]
#define NEED_CONTEXT \
    COUNT;           \
    if (entered.empty()) return 201 /* CUDA_ERROR_INVALID_CONTEXT */

API cuInit(unsigned flags) {
    return flags ? 1 : STANDIN_INIT;
}
API cuDriverGetVersion(int *version) {
    *version = STANDIN_VERSION;
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
    *count = STANDIN_DEVICES;
    return 0;
}
API cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal < STANDIN_DEVICES ? 0 : 101;
}
API cuDeviceGetName(char *name, int room, int) {
    std::strncpy(name, STANDIN_NAME, room);
    return 0;
}
API cuDeviceGetAttribute(int *value, int attribute, int) {
    static const std::map<int, int> values = {{16, 3},     {39, 2048},        {41, 1},          {75, 9},
                                              {76, 0},     {81, 228 << 10},   {97, 227 << 10}};
    const auto found = values.find(attribute);
    if (found == values.end()) return 1;
    *value = found->second;
    return 0;
}
API cuDevicePrimaryCtxRetain(void **context, int device) {
    Guard guard(lock);
    contexts[device].device = device;
    ++contexts[device].retained;
    ++alive["contexts"];
    *context = &contexts[device];
    return 0;
}
API cuDevicePrimaryCtxRelease_v2(int device) {
    Guard guard(lock);
    --contexts[device].retained;
    --alive["contexts"];
    return 0;
}
API cuCtxPushCurrent_v2(void *context) {
    COUNT;
    Context *pushed = static_cast<Context *>(context);
    if (pushed->retained == 0) return 201;
    entered.push_back(pushed);
    return 0;
}
API cuCtxPopCurrent_v2(void **context) {
    COUNT;
    if (entered.empty()) return 201;
    *context = entered.back();
    entered.pop_back();
    return 0;
}
API cuModuleLoadData(void **module, const void *image) {
    NEED_CONTEXT;
    if (std::memcmp(image, "\x7f" "ELFstand-in", 12) != 0) return 200;  // CUDA_ERROR_INVALID_IMAGE
    *module = new Module;
    ++alive["modules"];
    return 0;
}
API cuModuleUnload(void *module) {
    NEED_CONTEXT;
    delete static_cast<Module *>(module);
    --alive["modules"];
    return 0;
}
API cuModuleGetFunction(void **function, void *module, const char *name) {
    NEED_CONTEXT;
#ifndef STANDIN_BARE
    for (std::size_t at = 0; at < sizeof ENTRIES / sizeof *ENTRIES; ++at) {
        if (ENTRIES[at].name == std::string(name)) {
            *function = &static_cast<Module *>(module)->functions.try_emplace(name, Function{at, 48 << 10}).first->second;
            return 0;
        }
    }
#endif
    (void)function, (void)module, (void)name;
    return 500;  // CUDA_ERROR_NOT_FOUND
}
API cuFuncSetAttribute(void *function, int attribute, int value) {
    NEED_CONTEXT;
    if (attribute != 8 || value > 227 << 10) return 1;
    static_cast<Function *>(function)->shared = value;
    return 0;
}
API cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    NEED_CONTEXT;
    const Function found = *static_cast<Function *>(function);
    if (!gx || gy != 1 || gz != 1 || !bx || by != 1 || bz != 1 || bx > 1024 || extra) return 1;
    if (static_cast<int>(shared) > found.shared) return 1;
    ++alive["launches"];
#ifndef STANDIN_BARE
    pdkv::View view;
    std::memcpy(&view, arguments[0], sizeof view);
    ask(stream, [=] {
        gridDim.x = gx;
        blockDim.x = bx;
        for (blockIdx.x = 0; blockIdx.x < gx; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < bx; ++threadIdx.x) ENTRIES[found.entry].run(view);
    });
#else
    (void)stream, (void)arguments;
#endif
    return 0;
}
API cuStreamCreate(void **stream, unsigned flags) {
    NEED_CONTEXT;
    *stream = new Stream{flags, 0, 0};
    ++alive["streams"];
    if (flags != 1) ++alive["blocking streams"];
    return 0;
}
API cuStreamDestroy_v2(void *stream) {
    NEED_CONTEXT;
    run();
    delete static_cast<Stream *>(stream);
    --alive["streams"];
    return 0;
}
API cuStreamSynchronize(void *) {
    NEED_CONTEXT;
    run();
    return 0;
}
API cuStreamQuery(void *stream) {
    NEED_CONTEXT;
    return stream_of(stream)->asked == stream_of(stream)->done ? 0 : 600;
}
API cuStreamWaitEvent(void *, void *, unsigned flags) {
    NEED_CONTEXT;
    ++alive["waits"];
    return flags ? 1 : 0;
}
API cuEventCreate(void **event, unsigned flags) {
    NEED_CONTEXT;
    *event = new Event{nullptr, 0};
    ++alive["events"];
    return flags == 2 ? 0 : 1;
}
API cuEventDestroy_v2(void *event) {
    NEED_CONTEXT;
    delete static_cast<Event *>(event);
    --alive["events"];
    return 0;
}
API cuEventRecord(void *event, void *stream) {
    NEED_CONTEXT;
    *static_cast<Event *>(event) = {stream_of(stream), stream_of(stream)->asked};
    return 0;
}
API cuEventQuery(void *event) {
    NEED_CONTEXT;
    const Event *found = static_cast<Event *>(event);
    return found->stream && found->stream->done < found->at ? 600 : 0;
}
API cuEventSynchronize(void *) {
    NEED_CONTEXT;
    run();
    return 0;
}
API cuMemAlloc_v2(std::uint64_t *address, std::size_t bytes) {
    NEED_CONTEXT;
    if (bytes == 0) return 1;
    if (bytes > std::size_t(1) << 40) return 2;
    *address = reinterpret_cast<std::uint64_t>(std::malloc(bytes));
    device_memory[*address] = bytes;
    ++alive["device memory"];
    return 0;
}
API cuMemFree_v2(std::uint64_t address) {
    NEED_CONTEXT;
    run();
    if (!device_memory.erase(address)) return 1;
    std::free(reinterpret_cast<void *>(address));
    --alive["device memory"];
    return 0;
}
API cuMemHostAlloc(void **start, std::size_t bytes, unsigned) {
    NEED_CONTEXT;
    *start = std::malloc(bytes);
    std::memset(*start, 0xA5, bytes);
    host_memory[reinterpret_cast<std::uint64_t>(*start)] = bytes;
    ++alive["host memory"];
    return 0;
}
API cuMemFreeHost(void *start) {
    NEED_CONTEXT;
    run();
    host_memory.erase(reinterpret_cast<std::uint64_t>(start));
    std::free(start);
    --alive["host memory"];
    return 0;
}
API cuMemcpyAsync(std::uint64_t dst, std::uint64_t src, std::size_t bytes, void *stream) {
    NEED_CONTEXT;
    ask(stream, [=] { std::memcpy(reinterpret_cast<void *>(dst), reinterpret_cast<const void *>(src), bytes); });
    return 0;
}
API cuMemsetD8Async(std::uint64_t dst, unsigned char byte, std::size_t bytes, void *stream) {
    NEED_CONTEXT;
    ask(stream, [=] { std::memset(reinterpret_cast<void *>(dst), byte, bytes); });
    return 0;
}
API cuPointerGetAttributes(unsigned count, const int *attributes, void *const *values, std::uint64_t address) {
    NEED_CONTEXT;
    std::uint64_t base = 0, size = 0;
    unsigned kind = 0;
    for (const auto *memory : {&host_memory, &device_memory}) {
        for (const auto &[start, bytes] : *memory) {
            if (address >= start && address - start < bytes) {
                base = start, size = bytes, kind = memory == &device_memory ? 2 : 1;
            }
        }
    }
    for (unsigned at = 0; at < count; ++at) {
        switch (attributes[at]) {
            case 2: *static_cast<unsigned *>(values[at]) = kind; break;
            case 8: *static_cast<bool *>(values[at]) = false; break;
            case 9: *static_cast<int *>(values[at]) = kind == 2 ? entered.back()->device : -2; break;
            case 10: *static_cast<bool *>(values[at]) = kind == 2; break;
            case 11: *static_cast<std::uint64_t *>(values[at]) = base; break;
            case 12: *static_cast<std::size_t *>(values[at]) = size; break;
            default: return 1;
        }
    }
    return 0;
}

struct Handle {
    char bytes[64];
};
#ifndef STANDIN_LACKS_IPC
API cuIpcGetMemHandle(Handle *handle, std::uint64_t address) {
    NEED_CONTEXT;
    if (!device_memory.count(address)) return 1;
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle->bytes, "PEER", 4);
    std::memcpy(handle->bytes + 8, &address, 8);
    return 0;
}
#endif
// Stands for another process: what a handle names is mapped where it is.
API cuIpcOpenMemHandle_v2(std::uint64_t *address, Handle handle, unsigned flags) {
    NEED_CONTEXT;
    if (std::memcmp(handle.bytes, "PEER", 4) != 0 || flags != 1) return 400;  // CUDA_ERROR_INVALID_HANDLE
    std::memcpy(address, handle.bytes + 8, 8);
    ++mapped[*address];
    ++alive["mappings"];
    return 0;
}
API cuIpcCloseMemHandle(std::uint64_t address) {
    NEED_CONTEXT;
    if (!mapped.count(address)) return 1;
    --alive["mappings"];
    return 0;
}

// What is alive and how deep this thread stands in contexts, as `name=count` a line.
extern "C" __attribute__((visibility("default"))) const char *standin_report() {
    Guard guard(lock);
    report = "depth=" + std::to_string(entered.size()) + "\n";
    for (const auto &[name, count] : alive) report += name + "=" + std::to_string(count) + "\n";
    return report.c_str();
}
