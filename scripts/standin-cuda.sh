#!/usr/bin/env bash
# Builds the stand-in for the CUDA driver, and the image that its kernels are loaded by, into a folder.
#
#     scripts/standin-cuda.sh OUT      prints two paths: for PDKV_CUDA_LIBRARY, and for PDKV_CUDA_IMAGE
#
# OUT/lib holds the same for libraries that look for `libcuda.so.1` themselves. With the two set pdkv runs on GPUs that are host memory: to test everything above the driver, on machines without one. What the stand-in can be
# told to be and to do is written in rust/pdkv-device/tests/driver/standin/state.h. Needs a C++ compiler (CXX); builds nothing that is there and fresh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tests=$root/rust/pdkv-device/tests
mkdir -p "$1"
out=$(cd "$1" && pwd)
library=$out/libcuda-standin.so
image=$out/pdkv-standin.image

newer=$(find "$root/cuda" "$tests/driver" "$tests/kernels" -name '*.[ch]*' -newer "$library" -print -quit 2>/dev/null || echo absent)
if [ -n "$newer" ] || [ ! -e "$library" ]; then
  # Never written in place: a process may have it mapped.
  fresh=$(mktemp "$out/libcuda-XXXXXX.so")
  trap 'rm -f "$fresh"' EXIT
  "${CXX:-c++}" -std=c++17 -O1 -g -shared -fPIC -fno-strict-aliasing -fvisibility=hidden -Wall -Wextra -Werror -Wno-unknown-pragmas \
    -Wno-maybe-uninitialized -I "$root/cuda" -I "$tests/kernels" -o "$fresh" "$tests/driver/standin.cpp"
  chmod 755 "$fresh"
  mv "$fresh" "$library"
fi
# Nor is the image, which processes that run beside this one load.
if [ ! -e "$image" ]; then
  whole=$(mktemp "$out/image-XXXXXX")
  printf '\x7fELFstand-in....' >"$whole"
  chmod 644 "$whole"
  mv "$whole" "$image"
fi
# What other libraries ask the linker for, such as UCX's module for CUDA: the same file by the driver's own name, and an NVML that has nothing. A
# process has them by LD_LIBRARY_PATH=OUT/lib.
mkdir -p "$out/lib"
if [ ! -e "$out/lib/libnvidia-ml.so.1" ]; then
  nvml=$(mktemp "$out/lib/nvml-XXXXXX.so")
  printf 'const char *nvmlErrorString(int status) { return status ? "there is no NVML beside the stand-in" : "success"; }\n' |
    "${CC:-cc}" -shared -fPIC -x c -o "$nvml" -
  chmod 755 "$nvml"
  mv "$nvml" "$out/lib/libnvidia-ml.so.1"
fi
if [ ! "$out/lib/libcuda.so.1" -ef "$library" ]; then
  ln -s ../libcuda-standin.so "$out/lib/libcuda-$$.so"
  mv -T "$out/lib/libcuda-$$.so" "$out/lib/libcuda.so.1"
fi
printf '%s\n%s\n' "$library" "$image"
