// Scores and sums of values by products of 16 bits. Each warp has all rows and its own slices of tokens, with a running
// maximum of its own. Scores become weights where they are: the sums of one product are the operand of the next.
#pragma once
#include "matrices.h"
#include "per_row.h"
#include "slice_scores.h"

namespace hpcdecode {

// kWide: K or V have more than 128 dims, and queries are read from shared memory for every slice. kParts: As in
// AttendForm.
template <class Num, bool kWide, int kParts>
struct ByTensor : SliceScores<Num> {
    using Scores = SliceScores<Num>;
    using Scores::s, Scores::row_of, Scores::score_of, Scores::greatest, Scores::floats_of, Scores::scale, Scores::mask;
    using P = typename Num::Product;
    using K = typename Num::K;
    using V = typename Num::V;
    static constexpr int kColumns = (kWide ? 256 : 128) / 8;  // of 8 dims of V
    static constexpr int kChunks = kColumns / V::kSpread;     // of a row of V
    static constexpr int kSteps = (kWide ? 256 : 128) / 16;   // of 16 dims of K
    static constexpr int kHeld = kWide ? 1 : kSteps;          // of these, those whose queries stay in registers

    struct Keys {
        uint32_t r[2][2 * K::kSpread];  // of tokens 0 to 7 and 8 to 15
    };

    Own<Sums<kColumns>> acc;          // [n] of rows and 8 dims
    Own<PerRow<2>> top, sum, middle;  // of rows l / 4 and l / 4 + 8 of lane l; sums are those of its own tokens
    Own<FragmentA> q[kHeld * kParts], weights[kParts], both;
    Own<FragmentB> b;
    Own<Keys> keys;
    Own<Bits> bits;
    Own<const uint8_t*> from, queries[kParts];

    HPC_DEVICE void put_query(const AttendItem& x, int row, int d, float value) const {
        const uint16_t high = P::of(value);
        const int at = row * x.at.q_stride + K::place(d) * 2;
        *x.shared<uint16_t>(x.at.q + at) = high;
        if constexpr (kParts == 2) *x.shared<uint16_t>(x.at.q_low + at) = P::of(value - P::up(high));
    }

    HPC_DEVICE void load_queries(const AttendItem& x) {
        if constexpr (Num::kScaled) {
            x.rotate_queries();
            x.block.each([&](int t) {
                const float* rotated = x.shared<float>(x.at.rotated);
                for (int row = t / kWarp; row < kRows; row += kWarps)
                    for (int d = t % kWarp; d < x.h.k_pad; d += kWarp)
                        put_query(x, row, d, d < x.h.k_dim ? rotated[row * x.h.k_dim + d] : 0.0f);
            });
        } else {
            x.each_query(x.h.k_pad, 1.0f, [&](int row, int d, float value) { put_query(x, row, d, value); });
        }
        x.block.sync();
        x.block.each([&](int t) {
            acc[t].clear();
            bits[t].take();
            top[t].fill(-infinity());
            sum[t].fill(0.0f);
            middle[t].fill(0.0f);
            HPC_UNROLL
            for (int part = 0; part < kParts; ++part)
                queries[part][t] = x.shared<uint8_t>(part == 0 ? x.at.q : x.at.q_low) + t % kSlice * x.at.q_stride +
                                   t % kWarp / 16 * 16;
        });
        HPC_UNROLL
        for (int step = 0; !kWide && step < kHeld; ++step) {
            if (step * 16 >= x.h.k_pad) break;
            HPC_UNROLL
            for (int part = 0; part < kParts; ++part)
                load_matrices<false>(x.block, queries[part], q[step * kParts + part], step * 32);
        }
    }

    // Returns where the slice of the warp of thread t lies.
    HPC_DEVICE static const uint8_t* slice_of(const AttendItem& x, int t, int stage) {
        return x.shared<uint8_t>(t / kWarp * x.at.warp + stage * x.at.slice);
    }

    HPC_DEVICE void score(const AttendItem& x, int stage) {
        x.block.each([&](int t) {
            s[t].clear();
            const int lane = t % kWarp;
            from[t] = slice_of(x, t, stage) + (K::kChunks ? lane / 16 * 8 + lane % 8 : lane / 4) * x.at.k_stride;
        });
        const int steps = x.h.k_pad / 16;
        if (steps == kSteps) {
            score_all<true>(x, steps);
        } else if constexpr (kWide) {
            for (int step = 0; step < steps; step += K::kSpread) score_steps(x, step, steps);
        } else {
            score_all<false>(x, steps);
        }
    }

    // kAll: There are kSteps steps, so that all loads can be under way at once.
    template <bool kAll>
    HPC_DEVICE void score_all(const AttendItem& x, int steps) {
        HPC_UNROLL
        for (int step = 0; step < kSteps; step += K::kSpread) {
            if (!kAll && step >= steps) break;
            score_steps(x, step, kAll ? kSteps : steps);
        }
    }

    // Multiplies the dims of one load of keys: one step of 16, or two.
    HPC_DEVICE void score_steps(const AttendItem& x, int step, int steps) {
        load_keys(x, step, steps);
        HPC_UNROLL
        for (int i = 0; i < K::kSpread; ++i) {
            if (step + i >= steps) break;
            HPC_UNROLL
            for (int part = 0; part < kParts; ++part) {
                if constexpr (kWide) load_matrices<false>(x.block, queries[part], q[part], (step + i) * 32);
                const int held = kWide ? part : (step + i) * kParts + part;
                HPC_UNROLL
                for (int n = 0; n < 2; ++n) {
                    x.block.each([&](int t) {
                        b[t].r[0] = keys[t].r[n][2 * i];
                        b[t].r[1] = keys[t].r[n][2 * i + 1];
                    });
                    multiply<P>(x.block, q[held], b, s, n);
                }
            }
        }
    }

    HPC_DEVICE void load_keys(const AttendItem& x, int step, int steps) {
        if constexpr (K::kChunks) {
            // Chunks of 16 bytes: two of one step of 16 dims, or one of each of two.
            load_pair<false>(x, step * 2 / K::kSpread, K::kSpread == 1 || step + 1 < steps, 8);
            x.block.each([&](int t) {
                HPC_UNROLL
                for (int n = 0; n < 2; ++n) {
                    K::spread(both[t].r[2 * n], keys[t].r[n], bits[t]);
                    K::spread(both[t].r[2 * n + 1], keys[t].r[n] + K::kSpread, bits[t]);
                }
            });
        } else {
            x.block.each([&](int t) {
                HPC_UNROLL
                for (int n = 0; n < 2; ++n)
                    K::keys(from[t] + n * 8 * x.at.k_stride, step * 16, t % 4, keys[t].r[n], bits[t]);
            });
        }
    }

    // Loads matrices from chunks `chunk` and `chunk` + 1 of rows: a lane whose number has the bit `second` has the rows
    // of the second one, or once more of the first one if there are no more.
    template <bool kTurned>
    HPC_DEVICE void load_pair(const AttendItem& x, int chunk, bool more, int second) {
        Own<const uint8_t*> at;
        x.block.each([&](int t) { at[t] = from[t] + ((t & second) && more ? 16 : 0); });
        load_matrices<kTurned>(x.block, at, both, chunk * 16);
    }

    // Turns scores into weights relative to 2^top.
    HPC_DEVICE void weigh(const AttendItem& x, int base, int stage) {
        Own<PerRow<2>> high;
        const bool all = x.all_seen(base);
        x.block.each([&](int t) {
            scale(x, t, stage);
            if (!all) mask(x, t, base);
            HPC_UNROLL
            for (int i = 0; i < 2; ++i) high[t].v[i] = greatest(s[t], i);
        });
        larger_of_rows<4>(x.block, high);
        x.block.each([&](int t) {
            Two fade;
            HPC_UNROLL
            for (int i = 0; i < 2; ++i) {
                const float now = high[t].v[i] > top[t].v[i] ? high[t].v[i] : top[t].v[i];
                const float unit = now == -infinity() ? 0.0f : now;
                fade.v[i] = power_of_2(top[t].v[i] - unit);
                top[t].v[i] = now;
                sum[t].v[i] *= fade.v[i];
                middle[t].v[i] *= fade.v[i];
                HPC_UNROLL
                for (int j = 0; j < 4; ++j) score_of(s[t], i, j) = power_of_2(score_of(s[t], i, j) - unit);
            }
            if (fade.v[0] != 1.0f || fade.v[1] != 1.0f) {
                HPC_UNROLL
                for (int n = 0; n < kColumns; ++n) {
                    HPC_UNROLL
                    for (int i = 0; i < 4; ++i) acc[t].v[n][i] *= fade.v[i / 2];
                }
            }
            put_weights(x, t, stage);
        });
    }

    // Makes weights the operand of the values' product. The sum of weights fits that of values: rounded as they are.
    HPC_DEVICE void put_weights(const AttendItem& x, int t, int stage) {
        HPC_UNROLL
        for (int n = 0; n < 2; ++n) {
            Two scales{{1.0f, 1.0f}}, middles{};
            if constexpr (Num::kScaled) scales = floats_of(x, t, stage, kScaleOfV, n);
            if constexpr (V::kMiddle) middles = floats_of(x, t, stage, kMiddleOfV, n);
            HPC_UNROLL
            for (int i = 0; i < 2; ++i) {
                const float a = s[t].v[n][i * 2], b = s[t].v[n][i * 2 + 1];
                const Two rounded = put_pair(t, n * 2 + i, a * scales.v[0], b * scales.v[1]);
                sum[t].v[i] += Num::kScaled ? a + b : rounded.v[0] + rounded.v[1];
                if constexpr (V::kMiddle) middle[t].v[i] += a * middles.v[0] + b * middles.v[1];
            }
        }
    }

    // Returns what two numbers are rounded to.
    HPC_DEVICE Two put_pair(int t, int i, float a, float b) {
        const uint32_t high = P::two(a, b);
        weights[0][t].r[i] = high;
        Two rounded{{P::up(high & 0xffffu), P::up(high >> 16)}};
        if constexpr (kParts == 2) {
            const uint32_t low = P::two(a - rounded.v[0], b - rounded.v[1]);
            weights[1][t].r[i] = low;
            rounded.v[0] += P::up(low & 0xffffu);
            rounded.v[1] += P::up(low >> 16);
        }
        return rounded;
    }

    HPC_DEVICE void add(const AttendItem& x, int stage) {
        x.block.each([&](int t) { from[t] = slice_of(x, t, stage) + x.at.values + t % kSlice * x.at.v_stride; });
        const int chunks = x.h.v_row / 16;
        chunks == kChunks ? add_all<true>(x, chunks) : add_all<false>(x, chunks);
    }

    // kAll: There are kChunks chunks.
    template <bool kAll>
    HPC_DEVICE void add_all(const AttendItem& x, int chunks) {
        HPC_UNROLL
        for (int chunk = 0; chunk < kChunks; chunk += 2) {
            if (!kAll && chunk >= chunks) break;
            load_pair<true>(x, chunk, kAll || V::kSpread == 1 || chunk + 1 < chunks, 16);
            HPC_UNROLL
            for (int half = 0; half < 2; ++half) add_chunk(x, chunk, half);
        }
    }

    HPC_DEVICE void add_chunk(const AttendItem& x, int chunk, int half) {
        struct Spread {
            uint32_t r[2][V::kSpread];
        };
        Own<Spread> values;
        x.block.each([&](int t) {
            HPC_UNROLL
            for (int i = 0; i < 2; ++i) V::spread(both[t].r[2 * half + i], values[t].r[i], bits[t]);
        });
        HPC_UNROLL
        for (int i = 0; i < V::kSpread; ++i) {
            x.block.each([&](int t) {
                b[t].r[0] = values[t].r[0][i];
                b[t].r[1] = values[t].r[1][i];
            });
            HPC_UNROLL
            for (int part = 0; part < kParts; ++part)
                multiply<P>(x.block, weights[part], b, acc, (chunk + half) * V::kSpread + i);
        }
    }
};

}  // namespace hpcdecode
