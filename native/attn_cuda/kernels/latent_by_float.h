// Scores and sums over float32 latents, a tile of 32 tokens at a time.
//
// Eight warps share 16 query rows. Warp w scores rows 2 w and 2 w + 1, a lane one token. Then thread t sums dims t and
// t + 256 of all rows.
#pragma once
#include "latent_item.h"
#include "mma.h"

namespace hpcdecode {

struct LatentByFloat {
    static constexpr int kTile = kFloatTile;
    static constexpr int kOwnRows = kFloatRows, kOwnDims = kMaxLatentVDim / kLatentThreads;

    Own<PerRow<2>> s, top, sum;
    Own<Sums<kOwnRows * kOwnDims / 4>> acc;

    HPC_DEVICE void clear(int t) {
        acc[t].clear();
        for (int i = 0; i < 2; ++i) {
            top[t].v[i] = -infinity();
            sum[t].v[i] = 0.0f;
        }
    }

    HPC_DEVICE static FourFloats* four(const LatentItem& x, int offset, int row, int chunk) {
        return x.shared<FourFloats>(offset + chunk_at(row, x.at.stride, chunk));
    }
    HPC_DEVICE static float& weight(const LatentItem& x, int row, int token) {
        return x.shared<float>(x.at.weights)[row * kTile + token];
    }

    HPC_DEVICE static void put_query(const LatentItem& x, int row, int d, float value) {
        four(x, x.at.q, row, d / 4)->v[d % 4] = value;
    }

    HPC_DEVICE void score(const LatentItem& x, int tile) {
        x.block.each([&](int t) {
            s[t].v[0] = s[t].v[1] = 0.0f;
            HPC_UNROLL4
            for (int chunk = 0; chunk < x.h.k_pad / 4; ++chunk) {
                const FourFloats key = *four(x, tile, t % kWarp, chunk);
                HPC_UNROLL
                for (int i = 0; i < 2; ++i) {
                    const FourFloats q = *four(x, x.at.q, t / kWarp * 2 + i, chunk);
                    HPC_UNROLL
                    for (int j = 0; j < 4; ++j) s[t].v[i] += q.v[j] * key.v[j];
                }
            }
        });
    }

    // Turns scores into weights relative to 2^top. Needs a barrier before and one after.
    HPC_DEVICE void weigh(const LatentItem& x, int base) {
        Own<PerRow<2>> high;
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int i = 0; i < 2; ++i) {
                const Span seen = x.seen(t / kWarp * 2 + i);
                const int position = base + t % kWarp;
                s[t].v[i] = position >= seen.low && position < seen.high ? x.score(s[t].v[i]) : -infinity();
                high[t].v[i] = s[t].v[i];
            }
        });
        larger_of_rows<kWarp>(x.block, high);
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int i = 0; i < 2; ++i) {
                const int row = t / kWarp * 2 + i;
                const float now = high[t].v[i] > top[t].v[i] ? high[t].v[i] : top[t].v[i];
                const bool none = now == -infinity();
                const float fade = none ? 1.0f : exp2f(top[t].v[i] - now), w = none ? 0.0f : exp2f(s[t].v[i] - now);
                top[t].v[i] = now;
                sum[t].v[i] = sum[t].v[i] * fade + w;
                weight(x, row, t % kWarp) = w;
                if (t % kWarp == 0) x.shared<float>(x.at.alpha)[row] = fade;
            }
        });
    }

    HPC_DEVICE void add(const LatentItem& x, int tile) {
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int d = 0; d < kOwnDims; ++d) {
                const int dim = dim_of(t, d);
                if (dim >= x.h.v_pad) return;
                HPC_UNROLL
                for (int r = 0; r < kOwnRows; ++r) value(t, r, d) *= x.shared<float>(x.at.alpha)[r];
                for (int token = 0; token < kTile; ++token) {
                    const float v = four(x, tile, token, dim / 4)->v[dim % 4];
                    HPC_UNROLL
                    for (int r = 0; r < kOwnRows; ++r) value(t, r, d) += weight(x, r, token) * v;
                }
            }
        });
    }

    // Leaves tops and the sums of weights in shared memory.
    HPC_DEVICE void leave(const LatentItem& x) {
        sum_of_rows<kWarp>(x.block, sum);
        x.block.each([&](int t) {
            if (t % kWarp >= kTokenGroups) return;
            HPC_UNROLL
            for (int i = 0; i < 2; ++i) {
                const int row = t / kWarp * 2 + i, group = t % kWarp;
                x.shared<float>(x.at.tops)[row * kTokenGroups + group] = group == 0 ? sum[t].v[i] : 0.0f;
                if (group == 0) x.shared<float>(x.at.last)[row] = top[t].v[i];
            }
        });
    }

    // The row, the dim and the value of what thread t sums, r < kOwnRows, d < kOwnDims.
    HPC_DEVICE static int row_of(int, int r) { return r; }
    HPC_DEVICE static int dim_of(int t, int d) { return t + d * kLatentThreads; }
    HPC_DEVICE float& value(int t, int r, int d) { return acc[t].v[(r * kOwnDims + d) / 4][(r * kOwnDims + d) % 4]; }
};

}  // namespace hpcdecode
