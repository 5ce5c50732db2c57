// The shared memory of a block that attends over latents.
#pragma once
#include "../block_base.h"
#include "../latent_api.h"

namespace hpcdecode {

constexpr int kTensorRows = 32, kTensorTile = 64;  // twice the rows where heads are many
constexpr int kFloatRows = 16, kFloatTile = 32;
constexpr int kWeightStride = 128;  // bytes: the weights of a tile for one row, of either kind
constexpr int kTokenGroups = 4;     // warps that share the tokens of a row's tile, at most

// Returns where 16 bytes of a row lie. Eight rows of one chunk are in different banks. stride: A multiple of 128.
HPC_BOTH int chunk_at(int row, int stride, int chunk) { return row * stride + (chunk ^ (row & 7)) * 16; }

// Offsets in shared memory.
struct LatentShared {
    int stride, tile_bytes;  // of rows of q and of latents
    int q, q_low, tiles, weights, weights_low, tops, alpha, last, bytes;

    HPC_BOTH static LatentShared of(const HeadLayout& h, const LatentForm& f) {
        LatentShared s{};
        s.stride = (h.k_row + 127) / 128 * 128;
        s.tile_bytes = f.tile * s.stride;
        int at = 0;
        const auto take = [&at](int bytes) {
            const int begin = at;
            at += bytes;
            return begin;
        };
        s.tiles = take(f.stages * s.tile_bytes);
        s.q = take(f.rows * s.stride);
        s.q_low = f.parts == 2 ? take(f.rows * s.stride) : s.q;
        s.weights = take(f.rows * kWeightStride);
        s.weights_low = f.parts == 2 ? take(f.rows * kWeightStride) : s.weights;
        s.tops = take(f.rows * kTokenGroups * 4);  // of every group's tokens; in the end the sums of its weights
        s.alpha = take(f.rows * 4);                // what the sums so far fade by; in the end the factor of outputs
        s.last = take(f.rows * 4);                 // the greatest scores
        s.bytes = at;
        return s;
    }
};

}  // namespace hpcdecode
