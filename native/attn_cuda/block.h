// A thread block, as kernels see it.
//
// nvcc compiles it to the device's threads, barriers and instructions. A host compiler makes loops of its threads, so
// that tests run the same kernel source without a device. With HPCDECODE_BLOCK_THREADS they become threads of the
// system, for a race detector.
//
// A kernel is a sequence of phases, `each([&](int t) {...})`. A barrier separates two phases if one thread reads what
// another wrote. An Own<T> holds what a thread keeps from phase to phase, in registers.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

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

// Reduce x over every N neighbouring lanes to the largest or to the sum, in a fixed order.
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
