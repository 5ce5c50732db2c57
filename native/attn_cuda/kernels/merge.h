// Merges the partial results of one query token and head, in the order of their pieces, into its output.
#pragma once
#include "attend.h"

namespace hpcdecode {

struct Merged {
    float top, sum, acc[kMaxVDim / kThreads];  // of dims t, t + kThreads
};

constexpr int kMergeSmem = kMaxVDim * static_cast<int>(sizeof(float));

// Grid: row, query head.
HPC_DEVICE void merge(Block& block, const MergeArgs& a) {
    const HeadLayout& h = a.layer.head;
    const SequenceArgs& s = a.batch.sequences[a.batch.sequence_of[block.x]];
    const int group = a.layer.group, head = block.y / group;
    const int row = (block.x - s.first_row) * group + block.y % group;
    const Span seen = visible(a.layer, s, row);
    const int64_t stride = 2 + h.v_pad;
    float* out = reinterpret_cast<float*>(block.smem);  // [v_dim]
    block.each([&](int t) {
        Merged m{-infinity(), 0.0f, {}};
        for (int piece = seen.low / kPiece; piece * kPiece < seen.high; ++piece) {
            const int64_t item = s.first_item + static_cast<int64_t>(piece) * s.row_blocks + row / kRows;
            const float* p = a.partials + ((item * a.layer.heads + head) * kRows + row % kRows) * stride;
            if (p[0] == -infinity()) continue;
            const float top = p[0] > m.top ? p[0] : m.top, old = exp2f(m.top - top), now = exp2f(p[0] - top);
            m.top = top;
            m.sum = m.sum * old + p[1] * now;
            HPC_UNROLL
            for (int i = 0; i < kMaxVDim / kThreads; ++i) {
                const int d = t + i * kThreads;
                if (d < h.v_dim) m.acc[i] = m.acc[i] * old + p[2 + d] * now;
            }
        }
        float weight = 1.0f;
        if (a.sinks != nullptr) {
            const float sink = a.sinks[block.y] * kLog2E, top = sink > m.top ? sink : m.top;
            weight = exp2f(m.top - top);
            m.sum = m.sum * weight + exp2f(sink - top);
        }
        HPC_UNROLL
        for (int i = 0; i < kMaxVDim / kThreads; ++i) {
            const int d = t + i * kThreads;
            if (d < h.v_dim) out[d] = m.acc[i] * weight / m.sum;
        }
    });
    rotate(block, out, h.v_dim, h.v_rotation);
    const float part = 1.0f / static_cast<float>(h.v_rotation);
    block.each([&](int t) {
        const int64_t at = block.x * a.stride + static_cast<int64_t>(block.y) * h.v_dim;
        for (int d = t; d < h.v_dim; d += kThreads) store_act(a.out, a.type, at + d, out[d] * part);
    });
}

}  // namespace hpcdecode
