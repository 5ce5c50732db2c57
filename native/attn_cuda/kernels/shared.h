// The shared memory of a block that attends.
#pragma once
#include "numbers.h"

namespace hpcdecode {

constexpr int kScoreStride = kTile + 4;  // floats
constexpr float kLog2E = 1.4426950408889634f;

// Returns the bytes from row to row in shared memory: an odd number of 16, so that eight rows lie in different banks.
HPC_BOTH int stride_of(int row) { return (row / 16 | 1) * 16; }

// Offsets in shared memory. Queries are their high and their low parts, or floats.
struct Shared {
    int k_stride, v_stride, q_stride;  // bytes
    int k, v, q, q_low, scores, alpha, k_scales, v_scales, k_middles, v_middles, k_rows, v_rows, bytes;

    HPC_BOTH static Shared of(const HeadLayout& h, bool tensor) {
        Shared s{};
        s.k_stride = stride_of(h.k_row);
        s.v_stride = stride_of(h.v_row);
        s.q_stride = stride_of(h.k_pad * (tensor ? 2 : 4));
        int at = 0;
        const auto take = [&at](int bytes) {
            const int begin = at;
            at += (bytes + 15) / 16 * 16;
            return begin;
        };
        const int keys = kTile * s.k_stride, queries = h.k_middle ? kRows * h.k_dim * 4 : 0;  // rotated ones go first
        s.k = take(keys > queries ? keys : queries);
        s.v = take(kTile * s.v_stride);
        s.q = take(kRows * s.q_stride);
        s.q_low = tensor ? take(kRows * s.q_stride) : s.q;
        s.scores = take(kRows * kScoreStride * 4);
        s.alpha = take(kRows * 4);
        s.k_scales = take(2 * kTile * 4);  // of this tile and of the next
        s.v_scales = take(2 * kTile * 4);
        s.k_middles = take(h.k_middle ? 2 * kTile * 4 : 0);
        s.v_middles = take(h.v_middle ? 2 * kTile * 4 : 0);
        s.k_rows = take(kTile * 8);
        s.v_rows = take(kTile * 8);
        s.bytes = at;
        return s;
    }
};

// A block and its shared memory.
struct Stage {
    Block& block;
    const HeadLayout& h;
    Shared at;

    template <class T>
    HPC_DEVICE T* shared(int offset) const {
        return reinterpret_cast<T*>(block.smem + offset);
    }
};

}  // namespace hpcdecode
