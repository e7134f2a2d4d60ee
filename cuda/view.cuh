// The view: everything that says where bytes lie, and nothing that moves them.
//
// The same structs stand in rust/pdkv-device/src/kernels/view.rs; a test compiles this file and compares every size and
// offset. Addresses and strides are 64-bit and in bytes. What is copied are pages: page `p` of a lane goes from entry `p` of
// one table to entry `p` of the other. What a page means is not known here.
#pragma once

// The name of a kernel. Its number moves with the structs below, so that an image of another release is refused for want of
// a kernel instead of being run with a view that it does not know.
#define PDKV_NAMED(NAME) pdkv2_##NAME

namespace pdkv {

typedef unsigned int u32;
typedef unsigned long long u64;

// Division by a number that is known when the launch is made: n / divisor is the upper half of magic * n.
struct FastDiv {
    u64 magic;    // ceil(2^64 / divisor), or 0 where the divisor is 1
    u32 divisor;  // at least 1
    u32 unused;
};

// One plane at the source and the one that it fills; or, with a single page, one span.
struct alignas(16) Lane {
    u64 src;      // address of page 0
    u64 dst;      // address of page 0
    u64 logical;  // logical offset of this lane in a page, for checksums
    u64 bytes;    // of each of its pieces, contiguous on both sides; at most tiles * tile_bytes
};

// One launch. Work is numbered lane by lane, in a lane page by page, in a page piece by piece (outer, then inner), in a
// piece tile by tile.
struct View {
    const Lane *lanes;     // [num_lanes]
    const u32 *src_pages;  // [ceil((first_page + pages) / src_parts)], or null: entry i is i
    const u32 *dst_pages;  // [ceil((first_page + pages) / dst_parts)], or null: entry i is i
    u64 *sums;             // [first_page + pages], added to; only for kernels with sums
    u64 *flag;             // [1], becomes flag_value when all bytes are placed; null: nobody is told
    u32 *arrived;          // [1], zero before and after; needed where there is a flag
    u64 flag_value;
    u64 src_page_stride;   // from entry to entry
    u64 dst_page_stride;
    u64 src_part_stride;   // from part to part of an entry that holds several pages
    u64 dst_part_stride;
    u64 outer_src_stride;  // from piece to piece
    u64 outer_dst_stride;
    u64 outer_logical_stride;
    u64 inner_src_stride;
    u64 inner_dst_stride;
    u64 inner_logical_stride;
    FastDiv tiles;         // tiles of the longest piece; the last ones may be short or empty
    FastDiv inner;         // pieces along the inner axis
    FastDiv outer;         // pieces along the outer axis
    FastDiv pages;         // pages of this launch
    FastDiv src_parts;     // pages that an entry of the source's table holds
    FastDiv dst_parts;     // the same at the destination
    u32 first_page;        // position of this launch's first page in the tables
    u32 num_lanes;
    u32 num_items;         // tiles of all lanes
    u32 tile_bytes;
    u32 stages;            // tiles that a block of the bulk kernel keeps in shared memory, 2 to 8
    u32 unused;
};

}  // namespace pdkv
