// Merges the partial results of a query row. The warps of a block take the pieces of a sequence in turn, and their sums
// are added in the order of the warps: the order depends on the numbers of pieces alone.
#pragma once
#include "numbers.h"

namespace hpcdecode {

// Returns the bytes of shared memory that a merge of so many dims takes.
HPC_BOTH constexpr int merge_smem(int dims) { return (kWarps * dims + 2 * kWarps) * static_cast<int>(sizeof(float)); }

// Offers pieces first to last, at(piece) each: (m, sum, weighted values) for weights relative to 2^m.
// kDims: The most values of a lane. sink: Its score, or null. Calls put(d, x) for every d < dims.
template <int kDims, class At, class Put>
HPC_DEVICE void merge_pieces(Block& block, int first, int last, int dims, const float* sink, At&& at, Put&& put) {
    float *tops = reinterpret_cast<float*>(block.smem), *sums = tops + kWarps, *parts = sums + kWarps;
    Own<float> top;
    block.each([&](int t) {
        top[t] = sink != nullptr ? *sink * kLog2E : -infinity();
        for (int piece = first + t; piece <= last; piece += kThreads) top[t] = fmaxf(top[t], at(piece)[0]);
    });
    larger_of<kWarp>(block, top);
    block.each([&](int t) {
        if (t % kWarp == 0) tops[t / kWarp] = top[t];
    });
    block.sync();
    block.each([&](int t) {
        for (int warp = 0; warp < kWarps; ++warp) top[t] = fmaxf(top[t], tops[warp]);
        const int warp = t / kWarp, lane = t % kWarp;
        float sum = 0.0f, acc[kDims] = {};
        HPC_UNROLL4
        for (int piece = first + (warp - first % kWarps + kWarps) % kWarps; piece <= last; piece += kWarps) {
            const float *p = at(piece), part = power_of_2(p[0] - top[t]);
            sum += p[1] * part;
            HPC_UNROLL
            for (int i = 0; i < kDims; ++i)
                if (lane + i * kWarp < dims) acc[i] += p[2 + lane + i * kWarp] * part;
        }
        if (lane == 0) sums[warp] = sum;
        HPC_UNROLL
        for (int i = 0; i < kDims; ++i)
            if (lane + i * kWarp < dims) parts[warp * dims + lane + i * kWarp] = acc[i];
    });
    block.sync();
    block.each([&](int t) {
        float sum = sink != nullptr ? power_of_2(*sink * kLog2E - top[t]) : 0.0f;
        for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp];
        for (int d = t; d < dims; d += kThreads) {
            float all = 0.0f;
            for (int warp = 0; warp < kWarps; ++warp) all += parts[warp * dims + d];
            put(d, all / sum);
        }
    });
}

}  // namespace hpcdecode
