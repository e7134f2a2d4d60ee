// Calls on memory: allocations, copies, host memory, what is known of an address, and CUDA IPC.
#pragma once

#include "streams.h"

namespace {

u64 address_of(const void *pointer) {
    return reinterpret_cast<u64>(pointer);
}
void *at(u64 address) {
    return reinterpret_cast<void *>(address);
}

// The first bytes of a handle of CUDA IPC or of the fabric.
struct Name {
    char magic[8];
    int pid, fd, device;
    u64 inode, start;
};
struct Handle {
    char bytes[64];
};
static_assert(sizeof(Name) <= sizeof(Handle), "");

void write_name(void *handle, const char *magic, const Block &block, u64 start) {
    Name name = {{}, getpid(), block.fd, block.device, block.inode(), start};
    std::memcpy(name.magic, magic, std::strlen(magic) + 1);
    std::memset(handle, 0, sizeof(Handle));
    std::memcpy(handle, &name, sizeof name);
}
// The block that a name means, unless its process has ended or let go of it.
BlockPtr block_named(const void *handle, const char *magic, Name &name) {
    std::memcpy(&name, handle, sizeof name);
    if (std::strncmp(name.magic, magic, sizeof name.magic) != 0) return nullptr;
    const std::string path = "/proc/" + std::to_string(name.pid) + "/fd/" + std::to_string(name.fd);
    const BlockPtr block = block_of(open(path.c_str(), O_RDWR | O_CLOEXEC));
    return block && block->inode() == name.inode ? block : nullptr;
}

int free_mapping(std::unique_lock<std::mutex> &guard, u64 address, const char *counted) {
    progress_all(guard);
    const auto found = mappings.find(address);
    if (found == mappings.end() || found->second.kind == Kind::Laid || found->second.kind == Kind::Ipc) return 1;
    if (found->second.exported) {
        // Whoever still has it mapped reads this: on a device, anything.
        const std::string poison(found->second.bytes, '\xDD');
        if (pwrite(found->second.block->fd, poison.data(), poison.size(), 0) < 0) return 1;
    }
    unmap(address);
    --alive[counted];
    return sticky;
}

}  // namespace

API cuMemAlloc_v2(u64 *address, std::size_t bytes) {
    CALL_IN_CONTEXT(cuMemAlloc_v2);
    if (bytes == 0) return 1;
    if (bytes > std::size_t(1) << 40) return 2;
    const int device = entered.back()->device;
    const BlockPtr block = make_block(device, bytes, 0);
    const Mapping *mapping = block ? map_block(block, bytes, Kind::Alloc, {device}) : nullptr;
    if (!mapping) return 2;
    *address = mapping->start;
    ++alive["device memory"];
    return 0;
}
API cuMemFree_v2(u64 address) {
    CALL_IN_CONTEXT(cuMemFree_v2);
    return free_mapping(guard, address, "device memory");
}
// In the order of a stream: nobody is waited for, at neither end.
API cuMemAllocAsync(u64 *address, std::size_t bytes, void *stream) {
    CALL_IN_CONTEXT(cuMemAllocAsync);
    if (!settings.pools) return 801;  // CUDA_ERROR_NOT_SUPPORTED
    if (bytes == 0 || !stream_of(stream)) return 1;
    if (bytes >> 20 > static_cast<std::size_t>(settings.free_mib)) return 2;
    const int device = entered.back()->device;
    const BlockPtr block = make_block(device, bytes, 0);
    const Mapping *mapping = block ? map_block(block, bytes, Kind::Pool, {device}) : nullptr;
    if (!mapping) return 2;
    *address = mapping->start;
    ++alive["pool memory"];
    return 0;
}
API cuMemFreeAsync(u64 address, void *stream) {
    CALL_IN_CONTEXT(cuMemFreeAsync);
    const auto found = mappings.find(address);
    if (found == mappings.end() || found->second.kind != Kind::Pool) return 1;
    return ask(stream, [=] {
        unmap(address);
        --alive["pool memory"];
    });
}
API cuMemGetInfo_v2(std::size_t *free, std::size_t *total) {
    CALL_IN_CONTEXT(cuMemGetInfo_v2);
    *free = static_cast<std::size_t>(settings.free_mib) << 20;
    *total = std::size_t(1) << 37;
    return 0;
}
API cuMemHostAlloc(void **start, std::size_t bytes, unsigned) {
    CALL_IN_CONTEXT(cuMemHostAlloc);
    *start = std::aligned_alloc(PAGE, whole(bytes, PAGE));
    std::memset(*start, 0xA5, bytes);
    host_memory[address_of(*start)] = {bytes, true};
    pinned(bytes, 1);
    ++alive["host memory"];
    return 0;
}
API cuMemFreeHost(void *start) {
    CALL_IN_CONTEXT(cuMemFreeHost);
    progress_all(guard);
    const auto found = host_memory.find(address_of(start));
    if (found == host_memory.end() || !found->second.own) return 1;
    pinned(found->second.bytes, -1);
    host_memory.erase(found);
    std::free(start);
    --alive["host memory"];
    return sticky;
}
API cuMemHostRegister_v2(void *start, std::size_t bytes, unsigned flags) {
    CALL_IN_CONTEXT(cuMemHostRegister_v2);
    if (!bytes || (flags & ~0xBu) || !(flags & 2)) return 1;
    const u64 first = address_of(start);
    for (const auto &[known, memory] : host_memory)
        if (known < first + bytes && first < known + memory.bytes) return 712;
    if (find(first)) return 1;
    // Every page must be there, and writable unless the flags say that the device only reads.
    char access[5];
    u64 covered = first, from, to;
    std::FILE *maps = std::fopen("/proc/self/maps", "r");
    while (maps && std::fscanf(maps, "%lx-%lx %4s%*[^\n]", &from, &to, access) == 3)
        if (from <= covered && covered < to && access[0] == 'r' && (access[1] == 'w' || flags & 8)) covered = to;
    if (maps) std::fclose(maps);
    if (covered < first + bytes) return 1;
    host_memory[first] = {bytes, false};
    pinned(bytes, 1);
    ++alive["registered memory"];
    return 0;
}
API cuMemHostUnregister(void *start) {
    CALL_IN_CONTEXT(cuMemHostUnregister);
    const auto found = host_memory.find(address_of(start));
    if (found == host_memory.end() || found->second.own) return 713;
    pinned(found->second.bytes, -1);
    host_memory.erase(found);
    --alive["registered memory"];
    return sticky;
}
API cuMemHostGetDevicePointer_v2(u64 *address, void *start, unsigned flags) {
    CALL_IN_CONTEXT(cuMemHostGetDevicePointer_v2);
    const auto *host = find_host(address_of(start));
    if (flags || !host || (settings.strict && host->first != address_of(start))) return 1;
    *address = address_of(start);
    return 0;
}
API cuMemcpyAsync(u64 dst, u64 src, std::size_t bytes, void *stream) {
    CALL_IN_CONTEXT(cuMemcpyAsync);
    return ask(stream, [=] { std::memcpy(at(dst), at(src), bytes); });
}
API cuMemsetD8Async(u64 dst, unsigned char byte, std::size_t bytes, void *stream) {
    CALL_IN_CONTEXT(cuMemsetD8Async);
    return ask(stream, [=] { std::memset(at(dst), byte, bytes); });
}

namespace {

struct Attributes {
    int order, hints[4];
    unsigned flags;
};
int copy_batch(const u64 *dsts, const u64 *srcs, const std::size_t *sizes, std::size_t count, const Attributes *attributes,
               const std::size_t *firsts, std::size_t kinds, void *stream) {
    if (address_of(stream) <= 2 || !count || kinds != 1 || firsts[0] != 0) return 1;
    if (attributes->order < 1 || attributes->order > 3) return 1;
    struct Copy {
        u64 dst, src;
        std::size_t bytes;
    };
    std::vector<Copy> copies;
    for (std::size_t at = count; at-- > 0;) copies.push_back({dsts[at], srcs[at], sizes[at]});
    return ask(stream, [copies] {  // from the last to the first: a batch has no order
        for (const Copy &copy : copies) std::memcpy(at(copy.dst), at(copy.src), copy.bytes);
    });
}
int batch_of_12(u64 *dsts, u64 *srcs, std::size_t *sizes, std::size_t count, Attributes *attributes, std::size_t *firsts,
                std::size_t kinds, std::size_t *failed, void *stream) {
    CALL_IN_CONTEXT(cuMemcpyBatchAsync);
    *failed = SIZE_MAX;
    for (std::size_t at = 0; at < count; ++at) {
        if (sizes[at]) continue;
        *failed = at;
        return 1;
    }
    return copy_batch(dsts, srcs, sizes, count, attributes, firsts, kinds, stream);
}
int batch_of_13(u64 *dsts, u64 *srcs, std::size_t *sizes, std::size_t count, Attributes *attributes, std::size_t *firsts,
                std::size_t kinds, void *stream) {
    CALL_IN_CONTEXT(cuMemcpyBatchAsync);
    return copy_batch(dsts, srcs, sizes, count, attributes, firsts, kinds, stream);
}

}  // namespace

API cuGetProcAddress_v2(const char *symbol, void **function, int version, u64 flags, int *found) {
    CALL(cuGetProcAddress_v2);
    *function = nullptr;
    if (flags) return 1;
    *found = 1;  // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
    if (std::string(symbol) != "cuMemcpyBatchAsync" || settings.version < 12080) return 500;
    *found = version < 12080 || version > settings.version ? 2 : 0;
    if (*found) return 0;
    *function = version >= 13000 ? reinterpret_cast<void *>(batch_of_13) : reinterpret_cast<void *>(batch_of_12);
    return 0;
}

namespace {

// Writes one attribute of an address; 1 for an attribute that is not known here.
int tell(int attribute, void *value, u64 address) {
    const Mapping *mapping = find(address);
    const auto *host = mapping ? nullptr : find_host(address);
    const bool managed = mapping && mapping->kind == Kind::Managed;
    u64 base = mapping ? mapping->start : host ? host->first : 0;
    std::size_t size = mapping ? mapping->bytes : host ? host->second.bytes : 0;
    if (host && settings.strict) base = size = 0;
    if (mapping && mapping->kind == Kind::Laid) {
        const auto &reserved = *std::prev(reservations.upper_bound(address));
        base = reserved.first, size = reserved.second;
    }
    switch (attribute) {
        case 1: *static_cast<void **>(value) = mapping && mapping->kind != Kind::Laid ? &contexts[mapping->block->device] : nullptr; break;
        case 2: *static_cast<unsigned *>(value) = mapping ? 2 : host ? 1 : 0; break;
        case 3: *static_cast<u64 *>(value) = address; break;
        // What is mapped by hand has the number of its reservation; small allocations share the physical memory's.
        case 7: *static_cast<u64 *>(value) = !mapping ? 0 : mapping->kind == Kind::Laid ? base : mapping->identity; break;
        case 20:
            *static_cast<u64 *>(value) = !mapping || (mapping->kind == Kind::Alloc && size < GRANULARITY) ? 0 : mapping->identity;
            break;
        case 8: *static_cast<bool *>(value) = managed; break;
        case 9: *static_cast<int *>(value) = mapping ? settings.ordinal(mapping->block->device) : -2; break;
        case 10: *static_cast<bool *>(value) = mapping && mapping->kind == Kind::Alloc; break;
        case 11: *static_cast<u64 *>(value) = base; break;
        case 12: *static_cast<std::size_t *>(value) = size; break;
        default: return 1;
    }
    return 0;
}

}  // namespace

// Neither needs a context, unless the stand-in is told so.
API cuPointerGetAttributes(unsigned count, const int *attributes, void *const *values, u64 address) {
    CALL(cuPointerGetAttributes);
    if (settings.strict && (entered.empty() || !(find(address) || find_host(address)))) return 201;
    for (unsigned at = 0; at < count; ++at)
        if (const int status = tell(attributes[at], values[at], address)) return status;
    return 0;
}
API cuPointerGetAttribute(void *value, int attribute, u64 address) {
    CALL(cuPointerGetAttribute);
    if (settings.strict && entered.empty()) return 201;
    return find(address) || find_host(address) ? tell(attribute, value, address) : 1;
}
API cuMemGetAddressRange_v2(u64 *base, std::size_t *bytes, u64 address) {
    CALL_IN_CONTEXT(cuMemGetAddressRange_v2);
    const Mapping *mapping = find(address);
    const auto *host = find_host(address);
    if (!mapping && !host) return 1;
    *base = mapping ? mapping->start : host->first, *bytes = mapping ? mapping->bytes : host->second.bytes;
    return 0;
}

#ifndef STANDIN_LACKS_IPC
API cuIpcGetMemHandle(Handle *handle, u64 address) {
    CALL_IN_CONTEXT(cuIpcGetMemHandle);
    Mapping *mapping = find(address);
    if (!mapping || mapping->kind != Kind::Alloc) return 1;
    mapping->exported = true;
    write_name(handle, "IPC", *mapping->block, mapping->start);
    return 0;
}
#endif
API cuIpcOpenMemHandle_v2(u64 *address, Handle handle, unsigned flags) {
    CALL_IN_CONTEXT(cuIpcOpenMemHandle_v2);
    Name name;
    const BlockPtr block = block_named(&handle, "IPC", name);
    if (!block || flags != 1) return 400;  // CUDA_ERROR_INVALID_HANDLE
    if (name.pid == getpid()) return 201;
    if (settings.ordinal(block->device) < 0) return 101;
    const int device = entered.back()->device;
    if (device != block->device && !settings.peers) return 217;
    ++alive["mappings"];
    for (auto &[start, mapping] : mappings) {
        if (mapping.kind == Kind::Ipc && mapping.block->inode() == name.inode && mapping.devices.count(device)) {
            ++mapping.opened;
            *address = start;
            return 0;
        }
    }
    Mapping *mapping = map_block(block, block->bytes, Kind::Ipc, {device});
    if (!mapping) return 2;
    mapping->opened = 1;
    *address = mapping->start;
    return 0;
}
API cuIpcCloseMemHandle(u64 address) {
    CALL_IN_CONTEXT(cuIpcCloseMemHandle);
    const auto found = mappings.find(address);
    if (found == mappings.end() || found->second.kind != Kind::Ipc) return 1;
    --alive["mappings"];
    if (--found->second.opened == 0) unmap(address);
    return sticky;
}
