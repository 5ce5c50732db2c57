// Merges the partial results over latents of one query token and head, in the order of their pieces, into its output.
#pragma once
#include "latent_item.h"

namespace hpcdecode {

constexpr int kMergedDims = kMaxLatentVDim / kThreads;  // of a thread: dims t, t + kThreads, ...

struct MergedLatent {
    float top, sum, acc[kMergedDims];
};

// Grid: row, query head. Rows that see one piece have their outputs already.
HPC_DEVICE void merge_latent(Block& block, const LatentArgs& a) {
    const HeadLayout& h = a.layer.head;
    const SequenceArgs& s = a.batch.sequences[a.batch.sequence_of[block.x]];
    const int row = (block.x - s.first_row) * a.layer.group + block.y;
    const Span seen = visible(a.layer, s, row);
    const int first = seen.low / kLatentPiece, last = (seen.high - 1) / kLatentPiece;
    if (first == last) return;
    block.each([&](int t) {
        MergedLatent m{-infinity(), 0.0f, {}};
        for (int piece = first; piece <= last; ++piece) {
            const int64_t item = s.first_item + static_cast<int64_t>(piece) * s.row_blocks + row / a.form.rows;
            const float* p = a.partials + (item * a.form.rows + row % a.form.rows) * (2 + h.v_pad);
            if (p[0] == -infinity()) continue;
            const float top = p[0] > m.top ? p[0] : m.top, old = exp2f(m.top - top), now = exp2f(p[0] - top);
            m.top = top;
            m.sum = m.sum * old + p[1] * now;
            HPC_UNROLL
            for (int i = 0; i < kMergedDims; ++i) {
                const int d = t + i * kThreads;
                if (d < h.v_dim) m.acc[i] = m.acc[i] * old + p[2 + d] * now;
            }
        }
        float weight = 1.0f;
        if (a.sinks != nullptr) {
            const float sink = a.sinks[block.y] * kLatentLog2E, top = sink > m.top ? sink : m.top;
            weight = exp2f(m.top - top);
            m.sum = m.sum * weight + exp2f(sink - top);
        }
        const int64_t at = block.x * a.stride + static_cast<int64_t>(block.y) * h.v_dim;
        HPC_UNROLL
        for (int i = 0; i < kMergedDims; ++i) {
            const int d = t + i * kThreads;
            if (d < h.v_dim) store_act(a.out, a.type, at + d, m.acc[i] * weight / m.sum);
        }
    });
}

}  // namespace hpcdecode
