// The host twin as a program: reads cases from its standard input, runs them, and writes what became of the memory.
//
// A case is regions of memory at made-up addresses, tables, lanes and launches; addresses are moved to where the memory
// really is. Regions have exactly their size, so that the address sanitizer sees a step outside.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "entries.h"

using pdkv::u32;
using pdkv::u64;

namespace {

void fail(const char *why) {
    std::fprintf(stderr, "twin: %s\n", why);
    std::exit(3);
}

bool read_all(void *to, std::size_t bytes) {
    return bytes == 0 || std::fread(to, bytes, 1, stdin) == 1;
}
template <class T>
T read() {
    T value;
    if (!read_all(&value, sizeof value)) {
        fail("the case ends early");
    }
    return value;
}
template <class T>
std::vector<T> read_list() {
    std::vector<T> list(read<u64>());
    if (!read_all(list.data(), list.size() * sizeof(T))) {
        fail("the case ends early");
    }
    return list;
}
template <class T>
void write_list(const T *list, std::size_t count) {
    if (count && std::fwrite(list, sizeof(T), count, stdout) != count) {
        fail("nobody reads the result");
    }
}

struct Region {
    u64 base, bytes;
    unsigned char *memory;
};

u64 moved(const std::vector<Region> &regions, u64 address) {
    for (const Region &region : regions) {
        if (address >= region.base && address - region.base < region.bytes) {
            return reinterpret_cast<u64>(region.memory) + (address - region.base);
        }
    }
    fail("a lane begins outside of all regions");
    return 0;
}

// `seed` says in which order blocks run and when bulk copies happen.
void launch(const Entry &entry, const pdkv::View &view, u32 grid, u32 block, u32 seed) {
    std::mt19937 random(seed);
    std::vector<u32> order(grid);
    for (u32 at = 0; at < grid; ++at) {
        order[at] = at;
    }
    for (u32 at = grid; at > 1; --at) {
        std::swap(order[at - 1], order[random() % at]);
    }
    pdkv::engine.late_loads = seed & 1;
    pdkv::engine.late_stores = seed & 2;
    gridDim.x = grid;
    blockDim.x = block;
    const u64 before = view.flag ? *view.flag : 0;
    for (u32 at = 0; at < grid; ++at) {
        blockIdx.x = order[at];
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) {
            if (view.flag && *view.flag != before) {
                fail("the flag is up before the last thread has run");
            }
            entry.run(view);
        }
    }
}

void run_case() {
    std::vector<Region> regions(read<u64>());
    for (Region &region : regions) {
        region.base = read<u64>();
        region.bytes = read<u64>();
        void *memory = nullptr;
        if (posix_memalign(&memory, 256, region.bytes) != 0) {
            fail("no memory");
        }
        region.memory = static_cast<unsigned char *>(memory);
        if (!read_all(region.memory, region.bytes)) {
            fail("the case ends early");
        }
    }
    const std::vector<u32> src_pages = read_list<u32>(), dst_pages = read_list<u32>();
    std::vector<pdkv::Lane> lanes = read_list<pdkv::Lane>();
    for (pdkv::Lane &lane : lanes) {
        lane.src = moved(regions, lane.src);
        lane.dst = moved(regions, lane.dst);
    }
    std::vector<u64> sums(read<u64>());
    u64 flag = 0;
    u32 arrived = 0;
    for (u64 launches = read<u64>(); launches > 0; --launches) {
        const std::vector<char> letters = read_list<char>();
        const std::string name(letters.begin(), letters.end());
        const u32 grid = read<u32>(), block = read<u32>(), shared = read<u32>(), seed = read<u32>();
        pdkv::View view = read<pdkv::View>();
        if (shared > pdkv::SHARED_BYTES) {
            fail("more shared memory than there is");
        }
        // Pointers come as: the number of the first lane, and whether there is such a thing.
        view.lanes = lanes.data() + reinterpret_cast<u64>(view.lanes);
        view.src_pages = view.src_pages ? src_pages.data() : nullptr;
        view.dst_pages = view.dst_pages ? dst_pages.data() : nullptr;
        view.sums = sums.data();
        view.flag = view.flag ? &flag : nullptr;
        view.arrived = &arrived;
        const Entry *found = nullptr;
        for (const Entry &entry : ENTRIES) {
            found = name == entry.name ? &entry : found;
        }
        if (!found) {
            fail("no such kernel");
        }
        launch(*found, view, grid, block, seed);
    }
    for (const Region &region : regions) {
        write_list(region.memory, region.bytes);
        std::free(region.memory);
    }
    write_list(sums.data(), sums.size());
    write_list(&flag, 1);
    write_list(&arrived, 1);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char **argv) {
    if (argc > 1 && std::string(argv[1]) == "--entries") {
        for (const Entry &entry : ENTRIES) {
            std::puts(entry.name);
        }
        return 0;
    }
    for (char more; std::fread(&more, 1, 1, stdin) == 1;) {
        run_case();
    }
}
