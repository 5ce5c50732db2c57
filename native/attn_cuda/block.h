// One thread block, as kernels see it. Under nvcc these are the device's own threads, barriers and instructions. A host
// compiler gets a block whose threads are loops, so that the same kernel source runs, and is tested, without a device;
// or, with HPCDECODE_BLOCK_THREADS, one whose threads are the system's, for a race detector to watch.
//
// A kernel is a sequence of phases, `each([&](int t) {...})`, with a barrier between two of them where one thread reads
// what another wrote. What a thread keeps from phase to phase is an Own<T>, its registers.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define HPC_DEVICE __device__ __forceinline__
#define HPC_BOTH __host__ __device__ inline
#define HPC_UNROLL _Pragma("unroll")
#else
#define HPC_DEVICE inline
#define HPC_BOTH inline
#define HPC_UNROLL
#endif

namespace hpcdecode {

constexpr int kThreads = 128;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

}  // namespace hpcdecode

#if defined(__CUDACC__)
#include "block_device.h"
#elif defined(HPCDECODE_BLOCK_THREADS)
#include "block_threads.h"
#else
#include "block_loops.h"
#endif

namespace hpcdecode {

HPC_DEVICE float float_of_bf16(uint16_t h) { return as_float(static_cast<uint32_t>(h) << 16); }
HPC_DEVICE uint32_t pair(uint16_t low, uint16_t high) { return low | static_cast<uint32_t>(high) << 16; }

// The largest, or the sum, of x over every N neighbouring lanes, in a fixed order.
template <int N>
HPC_DEVICE void larger_of(Block& block, Own<float>& x) {
    for (int mask = 1; mask < N; mask *= 2) {
        const Own<float> other = block.exchange(x, mask);
        block.each([&](int t) { x[t] = x[t] > other[t] ? x[t] : other[t]; });
    }
}
template <int N>
HPC_DEVICE void sum_of(Block& block, Own<float>& x) {
    for (int mask = 1; mask < N; mask *= 2) {
        const Own<float> other = block.exchange(x, mask);
        block.each([&](int t) { x[t] += other[t]; });
    }
}

}  // namespace hpcdecode
