// The end of a launch: the last block to arrive tells the host, so that nobody needs to ask the driver.
#pragma once

namespace pdkv {

__device__ __forceinline__ void finish(const View &view) {
    if (view.flag == nullptr) {
        return;
    }
    __syncthreads();
    // The last thread, because the host twin runs them one after the other.
    if (threadIdx.x == blockDim.x - 1 && arrive(view.arrived) == gridDim.x - 1) {
        *view.arrived = 0;
        tell(view.flag, view.flag_value);
    }
}

}  // namespace pdkv
