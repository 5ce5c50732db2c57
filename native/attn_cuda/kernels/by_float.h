// Scores and sums of values by float32 arithmetic, a tile of 64 tokens at a time.
#pragma once
#include "mma.h"
#include "shared.h"

namespace hpcdecode {

// Thread t sums dims t % 32 + 32 * (t / 32 + 4 j), j < N / 4, of all rows.
template <class Num, int N>
struct ByFloat {
    using Elem = typename Num::Elem;
    Own<Sums<N>> acc;

    HPC_DEVICE void clear(int t) { acc[t].clear(); }

    HPC_DEVICE static void put_query(const Stage& stage, int row, int d, float x) {
        stage.shared<float>(stage.at.q + row * stage.at.q_stride)[d] = x;
    }

    // Thread t scores token t % 64 for 8 of the rows.
    HPC_DEVICE void score(const Stage& stage) {
        stage.block.each([&](int t) {
            const int token = t % kTile, first = t / kTile * 8;
            const float* key = stage.shared<float>(stage.at.k + token * stage.at.k_stride);
            float s[8] = {};
            for (int d = 0; d < stage.h.k_pad; ++d) {
                HPC_UNROLL
                for (int r = 0; r < 8; ++r)
                    s[r] += stage.shared<float>(stage.at.q + (first + r) * stage.at.q_stride)[d] * key[d];
            }
            HPC_UNROLL
            for (int r = 0; r < 8; ++r) stage.shared<float>(stage.at.scores)[(first + r) * kScoreStride + token] = s[r];
        });
    }

    HPC_DEVICE static float rounded(float w) { return w; }

    HPC_DEVICE void add(const Stage& stage) {
        stage.block.each([&](int t) {
            HPC_UNROLL
            for (int j = 0; j < N / 4; ++j) {
                const int dim = t % kWarp + kWarp * (t / kWarp + kWarps * j);
                if (dim >= stage.h.v_pad) return;
                HPC_UNROLL
                for (int r = 0; r < kRows; ++r)
                    acc[t].v[j * 4 + r / 4][r % 4] *= stage.shared<float>(stage.at.alpha)[r];
                for (int token = 0; token < kTile; ++token) {
                    const float x = stage.shared<float>(stage.at.v + token * stage.at.v_stride)[dim];
                    HPC_UNROLL
                    for (int r = 0; r < kRows; ++r)
                        acc[t].v[j * 4 + r / 4][r % 4] +=
                            stage.shared<float>(stage.at.scores)[r * kScoreStride + token] * x;
                }
            }
        });
    }

    // Returns the row and dim of acc[t].v[n][i].
    HPC_DEVICE static int row_of(int, int n, int i) { return n % 4 * 4 + i; }
    HPC_DEVICE static int dim_of(int t, int n, int) { return t % kWarp + kWarp * (t / kWarp + kWarps * (n / 4)); }
};

}  // namespace hpcdecode
