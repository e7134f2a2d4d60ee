// Device memory: memfds, so that other processes can be given them, mapped where no CPU may go except while the device runs.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>

#include "state.h"

namespace {

constexpr std::size_t PAGE = 4096;
constexpr std::size_t GRANULARITY = 2 << 20;  // of memory that descriptors name

// An allocation. Its memfd's name says what another process has to know of it.
struct Block {
    int fd, device, types;
    std::size_t bytes;

    ~Block() { close(fd); }
    u64 inode() const {
        struct stat found;
        return fstat(fd, &found) == 0 ? found.st_ino : 0;
    }
};
using BlockPtr = std::shared_ptr<Block>;

enum class Kind { Alloc, Pool, Managed, Ipc, Laid };

struct Mapping {
    u64 start;
    std::size_t bytes, room;  // room: whole pages
    BlockPtr block;
    Kind kind;
    std::set<int> devices;  // that may touch it
    u64 identity;
    u64 handle;             // of memory that descriptors name
    int opened;             // how often, by CUDA IPC
    bool exported;          // by CUDA IPC
};
std::map<u64, Mapping> &mappings = *new std::map<u64, Mapping>;
std::map<u64, std::size_t> &reservations = *new std::map<u64, std::size_t>;
std::set<std::pair<int, int>> &peers = *new std::set<std::pair<int, int>>;  // that may touch each other's memory: who, whose

std::size_t whole(std::size_t bytes, std::size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

BlockPtr make_block(int device, std::size_t bytes, int types) {
    const std::string name =
        "pdkv-standin:" + std::to_string(device) + ":" + std::to_string(bytes) + ":" + std::to_string(types);
    const int fd = memfd_create(name.c_str(), MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, whole(bytes, PAGE)) != 0) return nullptr;
    const std::string dirt(std::min(bytes, PAGE), '\xA5');  // fresh memory is nobody's zeros
    if (pwrite(fd, dirt.data(), dirt.size(), 0) < 0) return nullptr;
    return BlockPtr(new Block{fd, device, types, bytes});
}
// The block behind a descriptor, which is taken; none where it is something else.
BlockPtr block_of(int fd) {
    char link[512] = {};
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    int device = 0, types = 0;
    std::size_t bytes = 0;
    if (fd < 0 || readlink(path.c_str(), link, sizeof link - 1) < 0 ||
        std::sscanf(link, "/memfd:pdkv-standin:%d:%zu:%d", &device, &bytes, &types) != 3) {
        if (fd >= 0) close(fd);
        return nullptr;
    }
    return BlockPtr(new Block{fd, device, types, bytes});
}

Mapping *find(u64 address) {
    auto after = mappings.upper_bound(address);
    if (after == mappings.begin()) return nullptr;
    Mapping &mapping = std::prev(after)->second;
    return address - mapping.start < mapping.bytes ? &mapping : nullptr;
}
Mapping *map_block(const BlockPtr &block, std::size_t bytes, Kind kind, std::set<int> devices, u64 at = 0) {
    const std::size_t room = whole(bytes, PAGE);
    const int access = settings.open ? PROT_READ | PROT_WRITE : PROT_NONE;
    void *start = mmap(reinterpret_cast<void *>(at), room, access, MAP_SHARED | (at ? MAP_FIXED : 0), block->fd, 0);
    if (start == MAP_FAILED) return nullptr;
    const u64 address = reinterpret_cast<u64>(start);
    static u64 made = 0;
    return &(mappings[address] = {address, bytes, room, block, kind, std::move(devices), ++made, 0, 0, false});
}
void unmap(u64 start) {
    const Mapping &mapping = mappings.at(start);
    if (mapping.kind == Kind::Laid) {  // the addresses stay reserved
        mmap(reinterpret_cast<void *>(start), mapping.room, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    } else {
        munmap(reinterpret_cast<void *>(start), mapping.room);
    }
    mappings.erase(start);
}

// While this lives, memory that a device may touch can be touched; -1: memory that any may, as the copies of a driver do.
struct Running {
    explicit Running(int device) : device(device) { protect(PROT_READ | PROT_WRITE); }
    ~Running() { protect(PROT_NONE); }
    void protect(int access) const {
        if (settings.open) return;
        for (const auto &[start, mapping] : mappings) {
            const bool peer = mapping.kind != Kind::Laid && peers.count({device, mapping.block->device});
            const bool any = device < 0 && !mapping.devices.empty();
            if (any || peer || mapping.devices.count(device))
                mprotect(reinterpret_cast<void *>(start), mapping.room, access);
        }
    }
    int device;
};

// Host memory that the driver knows: its own, and what was registered.
struct Known {
    std::size_t bytes;
    bool own;
};
std::map<u64, Known> &host_memory = *new std::map<u64, Known>;

// Nothing less than a page can be pinned.
void pinned(std::size_t bytes, int sign) {
    alive["pinned bytes"] += sign * static_cast<long>(whole(bytes, PAGE));
    alive["most pinned bytes"] = std::max(alive["most pinned bytes"], alive["pinned bytes"]);
}

const std::pair<const u64, Known> *find_host(u64 address) {
    auto after = host_memory.upper_bound(address);
    if (after == host_memory.begin()) return nullptr;
    const auto &entry = *std::prev(after);
    return address - entry.first < entry.second.bytes ? &entry : nullptr;
}

// What a launch has changed most of gets one wrong byte.
struct Spoiler {
    std::map<u64, std::string> before;

    static std::map<u64, std::size_t> places() {
        std::map<u64, std::size_t> places;
        for (const auto &[start, mapping] : mappings)
            if (settings.open || mapping.kind != Kind::Laid || !mapping.devices.empty()) places[start] = mapping.bytes;
        for (const auto &[start, known] : host_memory)
            if (known.bytes > sizeof(u64)) places[start] = known.bytes;  // a word by itself is a flag, which no copy is about
        return places;
    }
    Spoiler() {
        Running running(-1);
        for (const auto &[start, bytes] : places()) before[start].assign(reinterpret_cast<char *>(start), bytes);
    }
    bool spoil() const {
        Running running(-1);
        std::vector<char *> most;
        for (const auto &[start, bytes] : before) {
            char *now = reinterpret_cast<char *>(start);
            std::vector<char *> changed;
            for (std::size_t at = 0; at < bytes.size(); ++at)
                if (now[at] != bytes[at]) changed.push_back(now + at);
            if (changed.size() > most.size()) most = std::move(changed);
        }
        if (!most.empty()) *most[most.size() / 2] ^= 1;
        return !most.empty();
    }
};

}  // namespace
