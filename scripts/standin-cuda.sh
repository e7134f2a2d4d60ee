#!/usr/bin/env bash
# Builds the stand-in for the CUDA driver, and the image that its kernels are loaded by, into a folder.
#
#     scripts/standin-cuda.sh OUT      prints two paths: for PDKV_CUDA_LIBRARY, and for PDKV_CUDA_IMAGE
#
# With these two set pdkv runs on GPUs that are host memory: to test everything above the driver, on machines without one. What the stand-in can be
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
printf '\x7fELFstand-in....' >"$image"
printf '%s\n%s\n' "$library" "$image"
