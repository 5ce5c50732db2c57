// One piece of a sequence's latents and the query rows that attend over it.
#pragma once
#include "latent_shared.h"
#include "per_row.h"
#include "piece_rows.h"

namespace hpcdecode {

struct LatentItem : PieceRows {
    Block& block;
    const LatentArgs& a;
    const HeadLayout& h;
    LatentShared at;

    HPC_DEVICE LatentItem(Block& b, const LatentArgs& args)
        : PieceRows(args.batch, args.layer, b.x, args.form.rows, kLatentPiece, args.form.tile),
          block(b),
          a(args),
          h(args.layer.head),
          at(LatentShared::of(args.layer.head, args.form)) {}

    template <class T>
    HPC_DEVICE T* shared(int offset) const {
        return reinterpret_cast<T*>(block.smem + offset);
    }

    // Returns a score of q.k in units of which weights are powers of 2.
    HPC_DEVICE float score(float x) const { return log2_score(a.layer, x * a.layer.scale); }
};

}  // namespace hpcdecode
