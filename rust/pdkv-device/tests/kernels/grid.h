// The machine of the host twin: takes the place of cuda/machine.cuh, so that a C++ compiler can run the kernels.
//
// A launch is a loop over blocks in any order, and in a block over threads in ascending order, each from start to end. That
// finds wrong places, wrong tails and wrong ends; it does not find races or what only hardware limits. Bulk copies may
// happen early or late, as late as the kernel's waiting allows: a wait that is missing shows as wrong bytes.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <deque>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(N) alignas(N)
#define PDKV_BULK 1

struct Index {
    unsigned x;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;
inline void __syncthreads() {}

namespace pdkv {

struct alignas(16) Bytes16 {
    u32 words[4];
};
struct alignas(8) Bytes8 {
    u32 words[2];
};

template <class T>
void load(T &to, u64 from) {
    to = *reinterpret_cast<const T *>(from);
}
template <class T>
void store(u64 to, const T &from) {
    *reinterpret_cast<T *>(to) = from;
}

inline u64 upper_half(u64 a, u64 b) {
    return static_cast<u64>(static_cast<unsigned __int128>(a) * b >> 64);
}

inline void thread_add(u64 *target, u64 value) {
    *target += value;
}
// Each thread is a warp of its own here: it adds for itself, and has one answer to every question.
inline void warp_add(u64 *target, u64 value) {
    thread_add(target, value);
}
inline bool warp_all(bool yes) {
    return yes;
}
inline u32 warp_first(u32 value) {
    return value;
}
inline u32 warp_rank() {
    return threadIdx.x;
}
inline u32 warp_width() {
    return 1;
}
inline void warp_sync() {}

inline u32 arrive(u32 *arrived) {
    return (*arrived)++;
}
inline void tell(u64 *flag, u64 value) {
    *flag = value;
}

// Bulk copies under way in the block that runs.
struct BulkEngine {
    struct Load {
        u64 *barrier;
        void *to;
        u64 from;
        u32 bytes;
        bool done;
    };
    struct Store {
        u64 to;
        const void *from;
        u32 bytes;
        bool done;
    };

    bool late_loads = false, late_stores = false;
    std::deque<Load> loads;
    std::deque<Store> stores;

    static void run(Load &load) {
        if (!load.done) {
            std::memcpy(load.to, reinterpret_cast<const void *>(load.from), load.bytes);
        }
        load.done = true;
    }
    void stores_until(std::size_t left) {
        for (; stores.size() > left; stores.pop_front()) {
            const Store &store = stores.front();
            if (!store.done) {
                std::memcpy(reinterpret_cast<void *>(store.to), store.from, store.bytes);
            }
        }
    }
};
// Never destroyed: at the end of a process the stand-in may still run kernels on other threads.
inline BulkEngine &engine = *new BulkEngine;

// A barrier counts its phases: how many loads on it have been waited for.
inline void barrier_make(u64 *barrier) {
    *barrier = 0;
}
inline void barriers_made() {}
inline void bulk_load(void *to, u64 from, u32 bytes, u64 *barrier) {
    engine.loads.push_back({barrier, to, from, bytes, false});
    if (!engine.late_loads) {
        BulkEngine::run(engine.loads.back());
    }
}
inline void bulk_loaded(u64 *barrier, u32 parity) {
    for (auto load = engine.loads.begin(); load != engine.loads.end(); ++load) {
        if (load->barrier == barrier) {
            if (*barrier % 2 != parity) {
                std::abort();  // waits for another phase than the one under way
            }
            BulkEngine::run(*load);
            ++*barrier;
            engine.loads.erase(load);
            return;
        }
    }
    std::abort();  // waits for a load that nobody asked for: on a device, for ever
}
inline void bulk_store(u64 to, const void *from, u32 bytes) {
    engine.stores.push_back({to, from, bytes, false});
    if (!engine.late_stores) {
        std::memcpy(reinterpret_cast<void *>(to), from, bytes);
        engine.stores.back().done = true;
    }
}
inline void bulk_stores_read_but_one() {
    engine.stores_until(1);
}
inline void bulk_stored() {
    engine.stores_until(0);
    if (!engine.loads.empty()) {
        std::abort();  // a load that nobody waits for writes into the next block's memory
    }
}

constexpr std::size_t SHARED_BYTES = 1 << 18;
inline unsigned char *shared_memory() {
    alignas(128) static unsigned char memory[SHARED_BYTES];
    return memory;
}

}  // namespace pdkv
