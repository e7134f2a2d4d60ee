// Copies by loads and stores: whole tiles by a warp, or vectors by a thread where pieces are small or badly aligned.
//
// Threads stay and take the next piece of work a whole grid further on, and each has several loads under way before its
// first store. Bulk copies are in bulk.cuh.
#pragma once

namespace pdkv {

// A warp copies a tile of UNROLL * 512 bytes. Everything is aligned to 16 bytes.
template <int UNROLL, bool SUMS>
__device__ __forceinline__ void copy_tiles(const View &view) {
    const u32 warps = gridDim.x * (blockDim.x / 32);
    const u32 first = threadIdx.x % 32 * 16;
    for (u64 item = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; item < view.num_items; item += warps) {
        const Tile tile = tile_of(view, static_cast<u32>(item));
        Bytes16 held[UNROLL];
        u64 sum = 0;
#pragma unroll
        for (int step = 0; step < UNROLL; ++step) {
            const u32 at = first + step * 512;
            if (at < tile.bytes) {
                load(held[step], tile.src + at);
            }
        }
#pragma unroll
        for (int step = 0; step < UNROLL; ++step) {
            const u32 at = first + step * 512;
            if (at < tile.bytes) {
                store(tile.dst + at, held[step]);
                if (SUMS) {
                    sum += sum_of(held[step], tile.logical + at);
                }
            }
        }
        if (SUMS) {
            warp_add(&view.sums[tile.page], sum);
        }
    }
    finish(view);
}

// A thread copies single vectors of sizeof(T) bytes, four at a time. Everything is aligned to sizeof(T).
template <class T, bool SUMS>
__device__ __forceinline__ void copy_vectors(const View &view) {
    constexpr int UNROLL = 4;
    const u64 round = static_cast<u64>(gridDim.x) * blockDim.x * UNROLL;
    const u64 start = static_cast<u64>(blockIdx.x) * blockDim.x * UNROLL + threadIdx.x;
    // A warp goes round together, so that it can add together; the last round may be short.
    for (u64 base = start; base - threadIdx.x % 32 < view.num_items; base += round) {
        T held[UNROLL];
        u64 dst[UNROLL];
        u64 logical[UNROLL];
        u32 page[UNROLL];
#pragma unroll
        for (int step = 0; step < UNROLL; ++step) {
            const u64 item = base + step * blockDim.x;
            dst[step] = 0;
            if (item < view.num_items) {
                const Tile tile = tile_of(view, static_cast<u32>(item));
                if (tile.bytes > 0) {
                    load(held[step], tile.src);
                    dst[step] = tile.dst;
                    logical[step] = tile.logical;
                    page[step] = tile.page;
                }
            }
        }
#pragma unroll
        for (int step = 0; step < UNROLL; ++step) {
            const bool mine = dst[step] != 0;
            if (mine) {
                store(dst[step], held[step]);
            }
            if (SUMS) {
                add_to_page(view.sums, mine, page[step], mine ? sum_of(held[step], logical[step]) : 0);
            }
        }
    }
    finish(view);
}

}  // namespace pdkv
