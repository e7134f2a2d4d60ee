// Where a numbered piece of work lies: the only place in which strides are multiplied.
#pragma once

namespace pdkv {

struct Tile {
    u64 src;      // address of [bytes]
    u64 dst;      // address of [bytes]
    u64 logical;  // logical offset in the page
    u32 bytes;    // up to tile_bytes; 0 past the end of a piece that is shorter than others
    u32 page;     // position in the tables
};

// n / by, and what is left of n.
__device__ __forceinline__ u32 divide(u32 &n, const FastDiv &by) {
    const u32 quotient = by.magic == 0 ? n : static_cast<u32>(upper_half(by.magic, n));
    n -= quotient * by.divisor;
    return quotient;
}

__device__ __forceinline__ u64 page_offset(const u32 *pages,  // [ceil((first_page + pages) / parts)], or null: entry i is i
                                           u32 page, const FastDiv &parts, u64 stride, u64 part_stride) {
    u32 part = page;
    const u32 entry = divide(part, parts);
    const u64 id = pages == nullptr ? entry : pages[entry];
    return id * stride + part * part_stride;
}

__device__ __forceinline__ Tile tile_of(const View &view, u32 item) {
    u32 tile = item;
    u32 inner = divide(tile, view.tiles);
    u32 outer = divide(inner, view.inner);
    u32 page = divide(outer, view.outer);
    const u32 number = divide(page, view.pages);
    const Lane lane = view.lanes[number];
    const u64 start = static_cast<u64>(tile) * view.tile_bytes;
    const u64 rest = start < lane.bytes ? lane.bytes - start : 0;
    Tile found;
    found.page = view.first_page + page;
    found.bytes = rest < view.tile_bytes ? static_cast<u32>(rest) : view.tile_bytes;
    found.src = lane.src + page_offset(view.src_pages, found.page, view.src_parts, view.src_page_stride, view.src_part_stride) +
                outer * view.outer_src_stride + inner * view.inner_src_stride + start;
    found.dst = lane.dst + page_offset(view.dst_pages, found.page, view.dst_parts, view.dst_page_stride, view.dst_part_stride) +
                outer * view.outer_dst_stride + inner * view.inner_dst_stride + start;
    found.logical = lane.logical + outer * view.outer_logical_stride + inner * view.inner_logical_stride + start;
    return found;
}

}  // namespace pdkv
