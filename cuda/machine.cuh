// The few things that differ between a GPU and the host that tests run on: loads, stores, atomics, bulk copies.
//
// On the host, rust/pdkv-device/tests/kernels/grid.h takes this file's place and calls each kernel thread by thread.
#pragma once

namespace pdkv {

struct alignas(16) Bytes16 {
    u32 words[4];
};
struct alignas(8) Bytes8 {
    u32 words[2];
};

// Loads and stores that leave the first-level cache alone: every byte is touched once.
__device__ __forceinline__ void load(Bytes16 &to, u64 from) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.words[0]), "=r"(to.words[1]), "=r"(to.words[2]), "=r"(to.words[3])
                 : "l"(from)
                 : "memory");
}
__device__ __forceinline__ void store(u64 to, const Bytes16 &from) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(from.words[0]), "r"(from.words[1]), "r"(from.words[2]), "r"(from.words[3])
                 : "memory");
}
template <class T>
__device__ __forceinline__ void load(T &to, u64 from) {
    to = *reinterpret_cast<const T *>(from);
}
template <class T>
__device__ __forceinline__ void store(u64 to, const T &from) {
    *reinterpret_cast<T *>(to) = from;
}

__device__ __forceinline__ u64 upper_half(u64 a, u64 b) {
    return __umul64hi(a, b);
}

// Adds what all threads of a warp bring to one target, which is the same for all of them.
__device__ __forceinline__ void warp_add(u64 *target, u64 value) {  // target: [1]
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_down_sync(0xffffffffu, value, distance);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(target, value);
    }
}

__device__ __forceinline__ void thread_add(u64 *target, u64 value) {  // target: [1]
    atomicAdd(target, value);
}

// Whether the question has one answer in the warp, and the answer is yes.
__device__ __forceinline__ bool warp_all(bool yes) {
    return __all_sync(0xffffffffu, yes);
}
__device__ __forceinline__ u32 warp_first(u32 value) {
    return __shfl_sync(0xffffffffu, value, 0);
}

// Makes this block's writes visible to every observer of what follows, then counts the block. Returns how many came before.
__device__ __forceinline__ u32 arrive(u32 *arrived) {  // arrived: [1]
    u32 before;
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
    return before;
}

// Visible to the host and to other GPUs only after everything that this thread knows of.
__device__ __forceinline__ void tell(u64 *flag, u64 value) {  // flag: [1]
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(flag), "l"(value) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define PDKV_BULK 1

// The shared memory that the launch asks for.
__device__ __forceinline__ unsigned char *shared_memory() {  // [stages][tile_bytes]
    extern __shared__ __align__(128) unsigned char memory[];
    return memory;
}
__device__ __forceinline__ u32 shared_address(const void *pointer) {  // pointer: [1] or more, of anything
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// A bulk load says on its barrier how many bytes have come; bulk stores are waited for by groups. A tile may be empty: then the
// barrier is passed at once and the group is an empty one, so that counting goes on, but the engine must not be asked for 0 bytes.
__device__ __forceinline__ void barrier_make(u64 *barrier) {  // barrier: [1]
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(shared_address(barrier)) : "memory");
}
// Made by this thread, seen by the others and by the engine, which has a way of its own to memory.
__device__ __forceinline__ void barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void bulk_load(void *to, u64 from, u32 bytes, u64 *barrier) {  // to, from: [bytes]; barrier: [1]
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
    if (bytes > 0) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :
                     : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
                     : "memory");
    }
}
__device__ __forceinline__ void bulk_loaded(u64 *barrier, u32 parity) {  // barrier: [1]
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n"
        :
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void bulk_store(u64 to, const void *from, u32 bytes) {  // to, from: [bytes]
    if (bytes > 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :
                     : "l"(to), "r"(shared_address(from)), "r"(bytes)
                     : "memory");
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// All stores but the latest one have read their tile.
__device__ __forceinline__ void bulk_stores_read_but_one() {
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}
// All stores have written.
__device__ __forceinline__ void bulk_stored() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif

// Which tiles' vectors a thread of a warp sums up: its own, one in 32.
__device__ __forceinline__ u32 warp_rank() {
    return threadIdx.x % 32;
}
__device__ __forceinline__ u32 warp_width() {
    return 32;
}
__device__ __forceinline__ void warp_sync() {
    __syncwarp();
}

}  // namespace pdkv
