// Merges the partial results of one query token and head into its output.
#pragma once
#include "pieces.h"
#include "place.h"
#include "rotate.h"

namespace hpcdecode {

constexpr int kMergeSmem = merge_smem(kMaxVDim) + kMaxVDim * static_cast<int>(sizeof(float));

// Grid: row, query head.
HPC_DEVICE void merge(Block& block, const MergeArgs& a) {
    const HeadLayout& h = a.layer.head;
    const SequenceArgs& s = a.batch.sequences[a.batch.sequence_of[block.x]];
    const int group = a.layer.group, head = block.y / group;
    const int row = (block.x - s.first_row) * group + block.y % group;
    const Span seen = visible(a.layer, s, row);
    float* out = reinterpret_cast<float*>(block.smem + merge_smem(kMaxVDim));  // [v_dim]
    merge_pieces<kMaxVDim / kWarp>(
        block, seen.low / kPiece, (seen.high - 1) / kPiece, h.v_dim, a.sinks ? a.sinks + block.y : nullptr,
        [&](int piece) -> const float* {
            const int64_t item = s.first_item + static_cast<int64_t>(piece) * s.row_blocks + row / kRows;
            return a.partials + ((item * a.layer.heads + head) * kRows + row % kRows) * (2 + h.v_pad);
        },
        [&](int d, float x) { out[d] = x; });
    rotate(block, out, h.v_dim, h.v_rotation);
    const float part = 1.0f / static_cast<float>(h.v_rotation);
    block.each([&](int t) {
        const int64_t at = block.x * a.stride + static_cast<int64_t>(block.y) * h.v_dim;
        for (int d = t; d < h.v_dim; d += kThreads) store_act(a.out, a.type, at + d, out[d] * part);
    });
}

}  // namespace hpcdecode
