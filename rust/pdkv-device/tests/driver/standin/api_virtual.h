// Calls on the driver's virtual memory: allocations apart from the addresses at which they are mapped.
#pragma once

#include "api_memory.h"

namespace {

struct Held {
    BlockPtr block;
    int holders;
};
std::map<u64, Held> &handles = *new std::map<u64, Held>;
u64 next_handle = 0x1000;

struct Properties {
    int kind, types;
    int location, device;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
struct Access {
    int location, device, flags;
};

u64 hold(const BlockPtr &block) {
    const u64 handle = next_handle++;
    handles[handle] = {block, 1};
    ++alive["allocations"];
    return handle;
}

}  // namespace

API cuMemGetAllocationGranularity(std::size_t *bytes, const Properties *, int) {
    CALL(cuMemGetAllocationGranularity);
    *bytes = GRANULARITY;
    return 0;
}
API cuMemCreate(u64 *handle, std::size_t bytes, const Properties *properties, u64 flags) {
    CALL(cuMemCreate);
    if (!settings.vmm) return 801;
    if (flags || !bytes || bytes % GRANULARITY || properties->kind != 1 || properties->location != 1) return 1;
    if (properties->device < 0 || properties->device >= static_cast<int>(settings.visible.size())) return 101;
    const BlockPtr block = make_block(settings.visible[properties->device], bytes, properties->types);
    if (!block) return 2;
    *handle = hold(block);
    return 0;
}
API cuMemRelease(u64 handle) {
    CALL(cuMemRelease);
    const auto found = handles.find(handle);
    if (found == handles.end()) return 1;
    --alive["allocations"];
    if (--found->second.holders == 0) handles.erase(found);
    return 0;
}
API cuMemAddressReserve(u64 *address, std::size_t bytes, std::size_t alignment, u64, u64 flags) {
    CALL(cuMemAddressReserve);
    if (!settings.vmm) return 801;
    if (!bytes || bytes % GRANULARITY || alignment > GRANULARITY || flags) return 1;
    // Behind it a granule that is nobody's.
    void *start = mmap(nullptr, bytes + 2 * GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return 2;
    const u64 first = whole(address_of(start), GRANULARITY);
    if (first > address_of(start)) munmap(start, first - address_of(start));
    const u64 end = address_of(start) + bytes + 2 * GRANULARITY;
    munmap(at(first + bytes + GRANULARITY), end - (first + bytes + GRANULARITY));
    reservations[*address = first] = bytes;
    ++alive["reservations"];
    return 0;
}
API cuMemAddressFree(u64 address, std::size_t bytes) {
    CALL(cuMemAddressFree);
    const auto found = reservations.find(address);
    if (found == reservations.end() || found->second != bytes) return 1;
    const auto inside = mappings.lower_bound(address);
    if (inside != mappings.end() && inside->first < address + bytes) return 1;
    munmap(at(address), bytes + GRANULARITY);
    reservations.erase(found);
    --alive["reservations"];
    return 0;
}
API cuMemMap(u64 address, std::size_t bytes, std::size_t offset, u64 handle, u64 flags) {
    CALL(cuMemMap);
    const auto held = handles.find(handle);
    const auto after = reservations.upper_bound(address);
    if (offset || flags || !bytes || bytes % GRANULARITY || address % GRANULARITY || held == handles.end()) return 1;
    if (bytes > held->second.block->bytes || after == reservations.begin()) return 1;
    const auto &[start, room] = *std::prev(after);
    if (address + bytes > start + room) return 1;
    const auto next = mappings.lower_bound(address);
    if ((next != mappings.end() && next->first < address + bytes) || find(address)) return 1;
    Mapping *mapping = map_block(held->second.block, bytes, Kind::Laid, {}, address);
    if (!mapping) return 2;
    mapping->handle = handle;
    ++alive["laid"];
    return 0;
}
API cuMemUnmap(u64 address, std::size_t bytes) {
    CALL(cuMemUnmap);
    const auto found = mappings.find(address);
    if (found == mappings.end() || found->second.kind != Kind::Laid || found->second.bytes != bytes) return 1;
    unmap(address);
    --alive["laid"];
    return sticky;
}
API cuMemSetAccess(u64 address, std::size_t bytes, const Access *access, std::size_t count) {
    CALL(cuMemSetAccess);
    progress_all(guard);
    std::vector<Mapping *> covered;
    for (u64 next = address; next < address + bytes; next = covered.back()->start + covered.back()->bytes) {
        const auto found = mappings.find(next);
        if (found == mappings.end() || found->second.kind != Kind::Laid) return 1;
        covered.push_back(&found->second);
    }
    if (covered.empty() || covered.back()->start + covered.back()->bytes != address + bytes) return 1;
    for (std::size_t at = 0; at < count; ++at) {
        const int ordinal = access[at].device;
        if (access[at].location != 1 || ordinal < 0 || ordinal >= static_cast<int>(settings.visible.size())) return 101;
        const int device = settings.visible[ordinal];
        for (Mapping *mapping : covered) {
            if (device != mapping->block->device && !settings.peers) return 101;
            if (access[at].flags == 3)
                mapping->devices.insert(device);
            else
                mapping->devices.erase(device);
        }
    }
    return sticky;
}
API cuMemRetainAllocationHandle(u64 *handle, void *pointer) {
    CALL(cuMemRetainAllocationHandle);
    const Mapping *mapping = find(address_of(pointer));
    if (!mapping || mapping->kind != Kind::Laid) return 1;
    Held &held = handles.try_emplace(mapping->handle, Held{mapping->block, 0}).first->second;
    ++held.holders;
    ++alive["allocations"];
    *handle = mapping->handle;
    return 0;
}
API cuMemGetAllocationPropertiesFromHandle(Properties *properties, u64 handle) {
    CALL(cuMemGetAllocationPropertiesFromHandle);
    const auto held = handles.find(handle);
    if (held == handles.end()) return 1;
    const Block &block = *held->second.block;
    *properties = {1, block.types, 1, settings.ordinal(block.device), nullptr, 0, 0, 0, {}};
    return 0;
}
API cuMemExportToShareableHandle(void *shareable, u64 handle, int type, u64 flags) {
    CALL(cuMemExportToShareableHandle);
    const auto held = handles.find(handle);
    if (held == handles.end() || flags) return 1;
    const Block &block = *held->second.block;
    if (!(block.types & type)) return 1;
    if (type == 8) {
        write_name(shareable, "FABRIC", block, 0);
        return 0;
    }
    const int fd = fcntl(block.fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return 304;  // CUDA_ERROR_OPERATING_SYSTEM
    *static_cast<int *>(shareable) = fd;
    return 0;
}
API cuMemImportFromShareableHandle(u64 *handle, void *shareable, int type) {
    CALL(cuMemImportFromShareableHandle);
    Name name;
    const int fd = static_cast<int>(address_of(shareable));
    const BlockPtr block = type == 8 ? block_named(shareable, "FABRIC", name) : block_of(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!block || !(block->types & type)) return 1;
    if (settings.ordinal(block->device) < 0) return 101;
    *handle = hold(block);
    return 0;
}
