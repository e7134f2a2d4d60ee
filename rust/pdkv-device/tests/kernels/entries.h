// The kernels, compiled for the host, by name.
#pragma once

#define PDKV_HOST 1
#include "pdkv.cu"

struct Entry {
    const char *name;
    void (*run)(pdkv::View);
};
#define ENTRY(NAME) {#NAME, NAME}, {#NAME "_sums", NAME##_sums}
const Entry ENTRIES[] = {
    ENTRY(pdkv_copy_tiles_1),   ENTRY(pdkv_copy_tiles_2),   ENTRY(pdkv_copy_tiles_4),   ENTRY(pdkv_copy_tiles_8),
    ENTRY(pdkv_copy_vectors_1), ENTRY(pdkv_copy_vectors_2), ENTRY(pdkv_copy_vectors_4), ENTRY(pdkv_copy_vectors_8),
    ENTRY(pdkv_copy_vectors_16), ENTRY(pdkv_copy_bulk),
};
