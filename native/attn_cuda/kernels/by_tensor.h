// Scores and sums of values by products of 16 bits, a tile of 64 tokens at a time.
#pragma once
#include "mma.h"
#include "shared.h"

namespace hpcdecode {

// N: columns of 8 dims of V that each warp sums, warp w those numbered w, w + 4, ...
template <class Num, int N>
struct ByTensor {
    using P = typename Num::Product;
    Own<Sums<N>> acc;

    HPC_DEVICE void clear(int t) { acc[t].clear(); }

    HPC_DEVICE static void put_query(const Stage& stage, int row, int d, float x) {
        const uint16_t high = P::of(x);
        stage.shared<uint16_t>(stage.at.q + row * stage.at.q_stride)[d] = high;
        stage.shared<uint16_t>(stage.at.q_low + row * stage.at.q_stride)[d] = P::of(x - P::up(high));
    }

    // Scores of all rows: warp w those of tokens 16 w to 16 w + 15.
    HPC_DEVICE void score(const Stage& stage) {
        Own<FragmentA> high, low;
        Own<FragmentB> b;
        Own<Sums<2>> s;
        stage.block.each([&](int t) {
            for (int i = 0; i < 4; ++i) s[t].v[0][i] = s[t].v[1][i] = 0.0f;
        });
        for (int k = 0; k < stage.h.k_pad; k += 16) {
            stage.block.each([&](int t) {
                query_fragment(stage, high[t], stage.at.q, t, k);
                query_fragment(stage, low[t], stage.at.q_low, t, k);
            });
            HPC_UNROLL
            for (int n = 0; n < 2; ++n) {
                stage.block.each([&](int t) {
                    const int token = t / kWarp * 16 + n * 8 + t % kWarp / 4;
                    Num::K::keys(stage.shared<uint8_t>(stage.at.k + token * stage.at.k_stride), k, t % 4, b[t].r);
                });
                multiply<P>(stage.block, high, b, s, n);
                multiply<P>(stage.block, low, b, s, n);
            }
        }
        stage.block.each([&](int t) {
            float* out =
                stage.shared<float>(stage.at.scores) + t % kWarp / 4 * kScoreStride + t / kWarp * 16 + t % 4 * 2;
            HPC_UNROLL
            for (int n = 0; n < 2; ++n) {
                for (int i = 0; i < 2; ++i) {
                    out[n * 8 + i] = s[t].v[n][i];
                    out[8 * kScoreStride + n * 8 + i] = s[t].v[n][2 + i];
                }
            }
        });
    }

    HPC_DEVICE static void query_fragment(const Stage& stage, FragmentA& f, int from, int t, int k) {
        HPC_UNROLL
        for (int i = 0; i < 4; ++i) {
            const int row = t % kWarp / 4 + i % 2 * 8;
            f.r[i] = *reinterpret_cast<const uint32_t*>(stage.shared<uint16_t>(from + row * stage.at.q_stride) + k +
                                                        t % 4 * 2 + i / 2 * 8);
        }
    }

    // Rounds a weight as its product does, so that the sum of weights fits the sum of values.
    HPC_DEVICE static float rounded(float w) {
        if constexpr (!Num::kScaled) {
            const float high = P::up(P::of(w));
            return high + P::up(P::of(w - high));
        }
        return w;
    }

    HPC_DEVICE void add(const Stage& stage) {
        const int columns = stage.h.v_pad / 8;
        Own<FragmentA> high, low;
        Own<FragmentB> b;
        Own<typename Num::V::Held> held;
        stage.block.each([&](int t) {
            const float* alpha = stage.shared<float>(stage.at.alpha) + t % kWarp / 4;
            HPC_UNROLL
            for (int n = 0; n < N; ++n) {
                HPC_UNROLL
                for (int i = 0; i < 4; ++i) acc[t].v[n][i] *= alpha[i / 2 * 8];
            }
        });
        for (int k = 0; k < kTile; k += 16) {
            stage.block.each([&](int t) {
                HPC_UNROLL
                for (int i = 0; i < 4; ++i) {
                    const int row = t % kWarp / 4 + i % 2 * 8;
                    const float* w =
                        stage.shared<float>(stage.at.scores) + row * kScoreStride + k + t % 4 * 2 + i / 2 * 8;
                    const uint16_t x = P::of(w[0]), y = P::of(w[1]);
                    high[t].r[i] = pair(x, y);
                    low[t].r[i] = pair(P::of(w[0] - P::up(x)), P::of(w[1] - P::up(y)));
                }
            });
            HPC_UNROLL
            for (int n = 0; n < N; ++n) {
                if (n * kWarps >= columns) break;
                stage.block.each([&](int t) {
                    const int column = t / kWarp + n * kWarps, token = k + t % 4 * 2;
                    b[t].r[0] = b[t].r[1] = 0;
                    if (column >= columns) return;
                    const uint8_t* row = stage.shared<uint8_t>(stage.at.v + token * stage.at.v_stride);
                    Num::V::values(row, stage.at.v_stride, stage.h.v_pad, n, column * 8 + t % kWarp / 4, held[t],
                                   b[t].r);
                });
                multiply<P>(stage.block, high, b, acc, n);
                multiply<P>(stage.block, low, b, acc, n);
            }
        }
    }

    // Returns the row and dim of acc[t].v[n][i].
    HPC_DEVICE static int row_of(int t, int, int i) { return t % kWarp / 4 + i / 2 * 8; }
    HPC_DEVICE static int dim_of(int t, int n, int i) { return (t / kWarp + n * kWarps) * 8 + t % 4 * 2 + i % 2; }
};

}  // namespace hpcdecode
