// Launches kernels, for nvcc.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "block.h"

namespace hpcdecode {
namespace {

extern __shared__ __align__(16) uint8_t shared_memory[];

__device__ __forceinline__ Block this_block() {
    return {static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), shared_memory};
}

void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(error));
}

// Launches x * y blocks of so many threads. smem: Bytes of shared memory of each.
template <class Args>
void launch(void (*kernel)(Args), const char* name, const Args& args, int x, int y, size_t smem, void* stream,
            int threads = kThreads) {
    if (x == 0) return;
    if (smem > 48 << 10)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem)), name);
    kernel<<<dim3(x, y), threads, smem, static_cast<cudaStream_t>(stream)>>>(args);
    check(cudaGetLastError(), name);
}

}  // namespace
}  // namespace hpcdecode
