// The kernels, compiled for the host, by name.
#pragma once

#define PDKV_HOST 1
#include "pdkv.cu"

struct Entry {
    const char *name;
    void (*run)(pdkv::View);
};
#define TEXT_OF(NAME) #NAME
#define TEXT(NAME) TEXT_OF(NAME)
#define ONE(NAME) {TEXT(PDKV_NAMED(NAME)), PDKV_NAMED(NAME)}
#define ENTRY(NAME) ONE(NAME), ONE(NAME##_sums)
const Entry ENTRIES[] = {
    ENTRY(copy_tiles_1),   ENTRY(copy_tiles_2),   ENTRY(copy_tiles_4),   ENTRY(copy_tiles_8),
    ENTRY(copy_vectors_1), ENTRY(copy_vectors_2), ENTRY(copy_vectors_4), ENTRY(copy_vectors_8),
    ENTRY(copy_vectors_16), ENTRY(copy_bulk),
    ONE(read_back_1), ONE(read_back_2), ONE(read_back_4), ONE(read_back_8), ONE(read_back_16),
};
