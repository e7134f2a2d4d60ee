// The checksum of a page: each aligned 32-bit word of it, little endian, times a weight of its logical place, summed
// modulo 2^64.
//
// The sum is linear, so it is the same in whatever order and width the page is read, and a part of a word adds its part.
// Weights are odd: one wrong word always shows. It guards against mistakes and broken hardware, not against an adversary.
// The twin is rust/pdkv-device/src/kernels/checksum.rs.
#pragma once

namespace pdkv {

__device__ __forceinline__ u64 weight_base(u64 place) {
    u64 mixed = (place + 1) * 0x9E3779B97F4A7C15ull;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    return mixed ^ (mixed >> 31);
}

// The weight of word `word` among the four at one place of 16 bytes.
__device__ __forceinline__ u64 weight(u64 base, u32 word) {
    return (base ^ (word * 0xD6E8FEB86659FD93ull)) | 1;
}

__device__ __forceinline__ u64 sum_of(const Bytes16 &bytes, u64 logical) {
    const u64 base = weight_base(logical / 16);
    u64 sum = 0;
    for (u32 word = 0; word < 4; ++word) {
        sum += bytes.words[word] * weight(base, word);
    }
    return sum;
}

__device__ __forceinline__ u64 sum_of(const Bytes8 &bytes, u64 logical) {
    const u64 base = weight_base(logical / 16);
    const u32 first = static_cast<u32>(logical / 4 % 4);
    return bytes.words[0] * weight(base, first) + bytes.words[1] * weight(base, first + 1);
}

// One, two or four bytes.
template <class T>
__device__ __forceinline__ u64 sum_of(T bytes, u64 logical) {
    const u32 word = static_cast<u32>(bytes) << (logical % 4 * 8);
    return word * weight(weight_base(logical / 16), static_cast<u32>(logical / 4 % 4));
}

// Adds what a thread found to the sum of its page, if it has one. The threads of a warp come by here together.
__device__ __forceinline__ void add_to_page(u64 *sums,  // [first_page + pages]
                                            bool mine, u32 page, u64 sum) {
    const u32 shared = warp_first(mine ? page : 0);
    if (warp_all(!mine || page == shared)) {
        warp_add(&sums[shared], mine ? sum : 0);
    } else if (mine) {
        thread_add(&sums[page], sum);
    }
}

}  // namespace pdkv
