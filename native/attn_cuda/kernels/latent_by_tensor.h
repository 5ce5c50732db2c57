// Scores and sums over latents of 16 bits by tensor cores, a tile of 64 tokens at a time.
//
// Eight warps share 32 R query rows. Warp w scores rows 16 R (w / 4) on of tokens 16 (w % 4) on. Then it sums columns
// 16 (w + 8 j) on of all rows. Tops, weights and what sums fade by go from one to the other through shared memory.
#pragma once
#include "latent_item.h"
#include "matrices.h"

namespace hpcdecode {

// kParts: As in LatentForm.
template <class Num, int R, int kParts>
struct LatentByTensor {
    using P = typename Num::Product;
    static constexpr int kTile = kTensorTile, kWarpsHere = kLatentThreads / kWarp, kTiles = 2 * R;
    static constexpr int kColumns = kMaxLatentVDim / 16 / kWarpsHere;  // of 16 dims
    static constexpr int kOwnRows = 2 * kTiles, kOwnDims = 4 * kColumns;

    Own<Sums<2 * R>> s;                    // scores: [m][n] of 16 rows and 8 tokens
    Own<Sums<kTiles * kColumns * 2>> acc;  // [m][j][n] of 16 rows and 8 dims
    Own<PerRow<2 * R>> top, sum;           // of the rows that a lane scores; the sum is that of its own tokens
    Own<const uint8_t*> from;
    Own<FragmentA> q, b, weights[kTiles];
    Own<FragmentB> first, second;

    HPC_DEVICE void clear(int t) {
        acc[t].clear();
        HPC_UNROLL
        for (int i = 0; i < 2 * R; ++i) {
            top[t].v[i] = -infinity();
            sum[t].v[i] = 0.0f;
        }
    }

    HPC_DEVICE static void put_query(const LatentItem& x, int row, int d, float value) {
        const uint16_t high = P::of(value);
        const int at = chunk_at(row, x.at.stride, d / 8) + d % 8 * 2;
        *x.template shared<uint16_t>(x.at.q + at) = high;
        if constexpr (kParts == 2) *x.template shared<uint16_t>(x.at.q_low + at) = P::of(value - P::up(high));
    }

    HPC_DEVICE static int scored_row(int t, int i) {
        return (t / kWarp / 4 * R + i / 2) * 16 + t % kWarp / 4 + i % 2 * 8;
    }
    HPC_DEVICE static int scored_token(int t, int n) { return t / kWarp % 4 * 16 + n * 8 + t % 4 * 2; }

    // Loads the 16 x 16 operand whose first row is `row`, from 16-byte column `chunk` on.
    HPC_DEVICE void load_rows(const LatentItem& x, Own<FragmentA>& to, int offset, int stride, int row, int chunk) {
        x.block.each([&](int t) {
            const int part = t % kWarp / 8;
            from[t] = x.shared<uint8_t>(offset) + chunk_at(row + part % 2 * 8 + t % 8, stride, chunk + part / 2);
        });
        load_matrices<false>(x.block, from, to);
    }

    // tile: Offset of the latents.
    HPC_DEVICE void score(const LatentItem& x, int tile) {
        x.block.each([&](int t) { s[t].clear(); });
        HPC_UNROLL4
        for (int chunk = 0; chunk < x.h.k_pad / 8; chunk += 2) {
            x.block.each([&](int t) {
                const int part = t % kWarp / 8, token = t / kWarp % 4 * 16 + part / 2 * 8 + t % 8;
                from[t] = x.shared<uint8_t>(tile) + chunk_at(token, x.at.stride, chunk + part % 2);
            });
            load_matrices<false>(x.block, from, b);
            halves(x.block, b, first, second);
            HPC_UNROLL
            for (int m = 0; m < R; ++m) {
                HPC_UNROLL
                for (int part = 0; part < kParts; ++part) {
                    x.block.each([&](int t) {
                        const int lane = t % kWarp, row = (t / kWarp / 4 * R + m) * 16 + lane / 8 % 2 * 8 + lane % 8;
                        from[t] = x.shared<uint8_t>(part == 0 ? x.at.q : x.at.q_low) +
                                  chunk_at(row, x.at.stride, chunk + lane / 16);
                    });
                    load_matrices<false>(x.block, from, q);
                    multiply<P>(x.block, q, first, s, m * 2);
                    multiply<P>(x.block, q, second, s, m * 2 + 1);
                }
            }
        }
    }

    // Turns scores into weights relative to 2^top. Has a barrier within, and needs one before and one after.
    HPC_DEVICE void weigh(const LatentItem& x, int base) {
        Own<PerRow<2 * R>> high;
        const bool all = x.all_seen(base);
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int i = 0; i < 2 * R; ++i) {
                Span seen{base, base + kTile};
                if (!all) seen = x.seen(scored_row(t, i));
                high[t].v[i] = -infinity();
                HPC_UNROLL
                for (int j = 0; j < 4; ++j) {
                    float& own = s[t].v[i / 2 * 2 + j / 2][i % 2 * 2 + j % 2];
                    const int position = base + scored_token(t, j / 2) + j % 2;
                    own = position >= seen.low && position < seen.high ? x.score(own) : -infinity();
                    high[t].v[i] = own > high[t].v[i] ? own : high[t].v[i];
                }
            }
        });
        larger_of_rows<4>(x.block, high);
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int i = 0; i < 2 * R; ++i)
                if (t % 4 == 0) group_of(x, t, i) = high[t].v[i];
        });
        x.block.sync();
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int i = 0; i < 2 * R; ++i) weigh_row(x, t, i);
        });
    }

    // The place of a group of tokens among the four of a row.
    HPC_DEVICE static float& group_of(const LatentItem& x, int t, int i) {
        return x.template shared<float>(x.at.tops)[scored_row(t, i) * kTokenGroups + t / kWarp % 4];
    }

    HPC_DEVICE void weigh_row(const LatentItem& x, int t, int i) {
        const int row = scored_row(t, i);
        const float* tops = x.shared<float>(x.at.tops) + row * kTokenGroups;
        float now = top[t].v[i];
        HPC_UNROLL
        for (int j = 0; j < kTokenGroups; ++j) now = tops[j] > now ? tops[j] : now;
        const bool none = now == -infinity();
        const float fade = none ? 1.0f : exp2f(top[t].v[i] - now);
        top[t].v[i] = now;
        float part = 0.0f;
        HPC_UNROLL
        for (int n = 0; n < 2; ++n) {
            uint16_t high[2], low[2] = {};
            HPC_UNROLL
            for (int j = 0; j < 2; ++j) {
                const float w = none ? 0.0f : exp2f(s[t].v[i / 2 * 2 + n][i % 2 * 2 + j] - now);
                high[j] = P::of(w);
                if constexpr (kParts == 2) low[j] = P::of(w - P::up(high[j]));
                part += P::up(high[j]) + P::up(low[j]);  // the sum of weights fits that of values
            }
            const int token = scored_token(t, n), at = chunk_at(row, kWeightStride, token / 8) + token % 8 * 2;
            *x.shared<uint32_t>(x.at.weights + at) = pair(high[0], high[1]);
            if constexpr (kParts == 2) *x.shared<uint32_t>(x.at.weights_low + at) = pair(low[0], low[1]);
        }
        sum[t].v[i] = sum[t].v[i] * fade + part;
        if (t / kWarp % 4 == 0 && t % 4 == 0) x.shared<float>(x.at.alpha)[row] = fade;
    }

    HPC_DEVICE void add(const LatentItem& x, int tile) {
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int r = 0; r < kOwnRows; ++r) {
                const float alpha = x.shared<float>(x.at.alpha)[row_of(t, r)];
                HPC_UNROLL
                for (int d = 0; d < kOwnDims; ++d) value(t, r, d) *= alpha;
            }
        });
        for (int token = 0; token < kTile; token += 16) {
            HPC_UNROLL
            for (int part = 0; part < kParts; ++part) {
                const int offset = part == 0 ? x.at.weights : x.at.weights_low;
                HPC_UNROLL
                for (int m = 0; m < kTiles; ++m) load_rows(x, weights[m], offset, kWeightStride, m * 16, token / 8);
                add_columns(x, tile, token);
            }
        }
    }

    HPC_DEVICE void add_columns(const LatentItem& x, int tile, int token) {
        const int columns = x.h.v_pad / 16;
        HPC_UNROLL
        for (int j = 0; j < kColumns; ++j) {
            if (j * kWarpsHere >= columns) break;
            x.block.each([&](int t) {
                const int part = t % kWarp / 8, row = token + part % 2 * 8 + t % 8;
                const int column = t / kWarp + j * kWarpsHere;  // beyond the last one: sums that nobody reads
                from[t] = x.shared<uint8_t>(tile) +
                          chunk_at(row, x.at.stride, (column < columns ? column : 0) * 2 + part / 2);
            });
            load_matrices<true>(x.block, from, b);
            halves(x.block, b, first, second);
            HPC_UNROLL
            for (int m = 0; m < kTiles; ++m) {
                multiply<P>(x.block, weights[m], first, acc, (m * kColumns + j) * 2);
                multiply<P>(x.block, weights[m], second, acc, (m * kColumns + j) * 2 + 1);
            }
        }
    }

    // Leaves tops and the sums of weights in shared memory.
    HPC_DEVICE void leave(const LatentItem& x) {
        sum_of_rows<4>(x.block, sum);
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int i = 0; i < 2 * R; ++i) {
                if (t % 4 != 0) continue;
                group_of(x, t, i) = sum[t].v[i];
                if (t / kWarp % 4 == 0) x.shared<float>(x.at.last)[scored_row(t, i)] = top[t].v[i];
            }
        });
    }

    // The row, the dim and the value of what thread t sums, r < kOwnRows, d < kOwnDims.
    HPC_DEVICE static int row_of(int t, int r) { return r / 2 * 16 + t % kWarp / 4 + r % 2 * 8; }
    HPC_DEVICE static int dim_of(int t, int d) {
        return (t / kWarp + d / 4 * kWarpsHere) * 16 + d / 2 % 2 * 8 + t % 4 * 2 + d % 2;
    }
    HPC_DEVICE float& value(int t, int r, int d) { return acc[t].v[r / 2 * kColumns * 2 + d / 2][r % 2 * 2 + d % 2]; }
};

}  // namespace hpcdecode
