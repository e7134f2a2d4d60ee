// Copies by the bulk engine: one warp a block keeps a ring of tiles in shared memory, its first thread gives the orders.
//
// No register holds a byte and no thread waits for a load of its own. Everything is aligned to 16 bytes.
#pragma once

#ifdef PDKV_BULK
namespace pdkv {

constexpr u32 MOST_STAGES = 8;

// The sum of the vectors that lie in shared memory, each thread its share.
__device__ __forceinline__ u64 sum_of_tile(const unsigned char *ring,  // [tile.bytes]
                                           const Tile &tile) {
    u64 sum = 0;
    for (u32 at = warp_rank() * 16; at < tile.bytes; at += warp_width() * 16) {
        sum += sum_of(*reinterpret_cast<const Bytes16 *>(ring + at), tile.logical + at);
    }
    return sum;
}

template <bool SUMS>
__device__ __forceinline__ void copy_bulk(const View &view) {
    unsigned char *const ring = shared_memory();  // [stages][tile_bytes]
    __shared__ u64 barriers[MOST_STAGES];
    if (warp_rank() == 0) {
        for (u32 stage = 0; stage < view.stages; ++stage) {
            barrier_make(&barriers[stage]);
        }
        barriers_made();
    }
    warp_sync();
    const u32 own = blockIdx.x < view.num_items ? (view.num_items - blockIdx.x - 1) / gridDim.x + 1 : 0;
    // Tile `number` of this block's own.
    const auto tile = [&](u32 number) { return tile_of(view, blockIdx.x + number * gridDim.x); };
    const auto fetch = [&](u32 number) {
        const Tile next = tile(number);
        const u32 stage = number % view.stages;
        bulk_load(ring + stage * view.tile_bytes, next.src, next.bytes, &barriers[stage]);
    };
    if (warp_rank() == 0) {
        for (u32 number = 0; number + 1 < view.stages && number < own; ++number) {
            fetch(number);
        }
    }
    for (u32 number = 0; number < own && warp_rank() < warp_width(); ++number) {
        const Tile current = tile(number);
        const u32 stage = number % view.stages;
        const unsigned char *held = ring + stage * view.tile_bytes;  // [tile_bytes]
        bulk_loaded(&barriers[stage], number / view.stages % 2);
        if (SUMS) {
            warp_add(&view.sums[current.page], sum_of_tile(held, current));
        }
        if (warp_rank() == 0) {
            bulk_store(current.dst, held, current.bytes);
            // The tile before this one has left its stage, which takes the tile that comes last.
            bulk_stores_read_but_one();
            if (number + view.stages - 1 < own) {
                fetch(number + view.stages - 1);
            }
        }
        warp_sync();
    }
    if (warp_rank() == 0) {
        bulk_stored();
    }
    finish(view);
}

}  // namespace pdkv
#endif
