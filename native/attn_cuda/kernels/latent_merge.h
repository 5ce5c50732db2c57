// Merges the partial results over latents of one query token and head into its output.
#pragma once
#include "latent_item.h"
#include "pieces.h"

namespace hpcdecode {

constexpr int kLatentMergeSmem = merge_smem(kMaxLatentVDim);

// Grid: row, query head. Rows that see one piece have their outputs already.
HPC_DEVICE void merge_latent(Block& block, const LatentArgs& a) {
    const HeadLayout& h = a.layer.head;
    const SequenceArgs& s = a.batch.sequences[a.batch.sequence_of[block.x]];
    const int row = (block.x - s.first_row) * a.layer.group + block.y;
    const Span seen = visible(a.layer, s, row);
    const int first = seen.low / kLatentPiece, last = (seen.high - 1) / kLatentPiece;
    if (first == last) return;
    const int64_t to = block.x * a.stride + static_cast<int64_t>(block.y) * h.v_dim;
    merge_pieces<kMaxLatentVDim / kWarp>(
        block, first, last, h.v_dim, a.sinks ? a.sinks + block.y : nullptr,
        [&](int piece) -> const float* {
            const int64_t item = s.first_item + static_cast<int64_t>(piece) * s.row_blocks + row / a.form.rows;
            return a.partials + (item * a.form.rows + row % a.form.rows) * (2 + h.v_pad);
        },
        [&](int d, float x) { store_act(a.out, a.type, to + d, x); });
}

}  // namespace hpcdecode
