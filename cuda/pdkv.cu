// All kernels: one translation unit, compiled by NVRTC for the device at hand, and by a C++ compiler for the tests.
//
// No header of CUDA's is included. A kernel takes one view by value and nothing else; what it is launched with is decided
// in rust/pdkv-device/src/kernels/launch.rs.

#include "view.cuh"
#ifdef PDKV_HOST
#include "grid.h"
#else
#include "machine.cuh"
#endif
#include "address.cuh"
#include "checksum.cuh"
#include "finish.cuh"
#include "copy.cuh"
#include "bulk.cuh"
#include "readback.cuh"

// NAME, and NAME_sums, which also adds up the checksums of the pages. THREADS a block, BLOCKS of them on a multiprocessor.
#define PDKV_KERNEL(NAME, THREADS, BLOCKS, BODY)                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                 \
        PDKV_NAMED(NAME)(const __grid_constant__ pdkv::View view) {                               \
        constexpr bool SUMS = false;                                                              \
        BODY;                                                                                     \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                 \
        PDKV_NAMED(NAME##_sums)(const __grid_constant__ pdkv::View view) {                        \
        constexpr bool SUMS = true;                                                               \
        BODY;                                                                                     \
    }

PDKV_KERNEL(copy_tiles_1, 256, 6, (pdkv::copy_tiles<1, SUMS>(view)))
PDKV_KERNEL(copy_tiles_2, 256, 6, (pdkv::copy_tiles<2, SUMS>(view)))
PDKV_KERNEL(copy_tiles_4, 256, 4, (pdkv::copy_tiles<4, SUMS>(view)))
PDKV_KERNEL(copy_tiles_8, 256, 3, (pdkv::copy_tiles<8, SUMS>(view)))

PDKV_KERNEL(copy_vectors_1, 256, 3, (pdkv::copy_vectors<unsigned char, SUMS>(view)))
PDKV_KERNEL(copy_vectors_2, 256, 3, (pdkv::copy_vectors<unsigned short, SUMS>(view)))
PDKV_KERNEL(copy_vectors_4, 256, 3, (pdkv::copy_vectors<pdkv::u32, SUMS>(view)))
PDKV_KERNEL(copy_vectors_8, 256, 3, (pdkv::copy_vectors<pdkv::Bytes8, SUMS>(view)))
PDKV_KERNEL(copy_vectors_16, 256, 3, (pdkv::copy_vectors<pdkv::Bytes16, SUMS>(view)))

#ifdef PDKV_BULK
PDKV_KERNEL(copy_bulk, 32, 4, (pdkv::copy_bulk<SUMS>(view)))
#endif

// Copies nothing and only adds up.
#define PDKV_READ_BACK(NAME, TYPE)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 3) PDKV_NAMED(NAME)(const __grid_constant__ pdkv::View view) { \
        pdkv::read_back<TYPE>(view);                                                                                 \
    }

PDKV_READ_BACK(read_back_1, unsigned char)
PDKV_READ_BACK(read_back_2, unsigned short)
PDKV_READ_BACK(read_back_4, pdkv::u32)
PDKV_READ_BACK(read_back_8, pdkv::Bytes8)
PDKV_READ_BACK(read_back_16, pdkv::Bytes16)
