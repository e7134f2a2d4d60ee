// Reads pages where a copy has placed them and adds up their checksums, for whoever compares them with those that the copy found.
//
// The view is the copy's, and of its two sides the destination counts; nothing of either is written.
#pragma once

namespace pdkv {

// A thread reads single vectors of sizeof(T) bytes, four at a time. Everything is aligned to sizeof(T).
template <class T>
__device__ __forceinline__ void read_back(const View &view) {
    constexpr int UNROLL = 4;
    const u64 round = static_cast<u64>(gridDim.x) * blockDim.x * UNROLL;
    const u64 start = static_cast<u64>(blockIdx.x) * blockDim.x * UNROLL + threadIdx.x;
    // A warp goes round together, as in copy_vectors.
    for (u64 base = start; base - threadIdx.x % 32 < view.num_items; base += round) {
        T held[UNROLL];
        bool mine[UNROLL];
        u64 logical[UNROLL];
        u32 page[UNROLL];
#pragma unroll
        for (int step = 0; step < UNROLL; ++step) {
            const u64 item = base + step * blockDim.x;
            mine[step] = false;
            if (item < view.num_items) {
                const Tile tile = tile_of(view, static_cast<u32>(item));
                if (tile.bytes > 0) {
                    load(held[step], tile.dst);
                    mine[step] = true;
                    logical[step] = tile.logical;
                    page[step] = tile.page;
                }
            }
        }
#pragma unroll
        for (int step = 0; step < UNROLL; ++step) {
            add_to_page(view.sums, mine[step], page[step], mine[step] ? sum_of(held[step], logical[step]) : 0);
        }
    }
    finish(view);
}

}  // namespace pdkv
