// The shared memory of a block that attends by float32 arithmetic.
#pragma once
#include "numbers.h"

namespace hpcdecode {

constexpr int kScoreStride = kTile + 4;  // floats

// Offsets in shared memory.
struct FloatShared {
    int k_stride, v_stride, q_stride;  // bytes
    int k, v, q, scores, alpha, k_rows, v_rows, bytes;

    HPC_BOTH static FloatShared of(const HeadLayout& h) {
        FloatShared s{};
        s.k_stride = stride_of(h.k_row);
        s.v_stride = stride_of(h.v_row);
        s.q_stride = stride_of(h.k_pad * 4);
        int at = 0;
        const auto take = [&at](int bytes) {
            const int begin = at;
            at += (bytes + 15) / 16 * 16;
            return begin;
        };
        s.k = take(kTile * s.k_stride);
        s.v = take(kTile * s.v_stride);
        s.q = take(kRows * s.q_stride);
        s.scores = take(kRows * kScoreStride * 4);
        s.alpha = take(kRows * 4);
        s.k_rows = take(kTile * 8);
        s.v_rows = take(kTile * 8);
        s.bytes = at;
        return s;
    }
};

}  // namespace hpcdecode
