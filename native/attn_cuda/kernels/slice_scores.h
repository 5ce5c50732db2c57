// The scores of a slice of 16 tokens for 16 query rows, as a warp's products give them.
#pragma once
#include "attend_item.h"
#include "mma.h"

namespace hpcdecode {

struct Two {
    float v[2];
};

template <class Num>
struct SliceScores {
    using K = typename Num::K;
    Own<Sums<2>> s;  // [n] of rows and 8 tokens

    // The rows of lane l are l / 4 and l / 4 + 8.
    HPC_DEVICE static int row_of(int t, int i) { return t % kWarp / 4 + i * 8; }

    // The score of one of a lane's four tokens: numbers 2 p, 2 p + 1, 2 p + 8, 2 p + 9 of the slice, p = l % 4.
    HPC_DEVICE static float& score_of(Sums<2>& s, int row, int j) { return s.v[j / 2][row * 2 + j % 2]; }
    HPC_DEVICE static float greatest(Sums<2>& s, int row) {
        const float a = score_of(s, row, 0), b = score_of(s, row, 1), c = score_of(s, row, 2), d = score_of(s, row, 3);
        return fmaxf(fmaxf(a, b), fmaxf(c, d));
    }

    // The floats of tokens 2 p and 2 p + 1 of 8 n on.
    HPC_DEVICE static Two floats_of(const AttendItem& x, int t, int stage, TokenFloat which, int n) {
        const float* at = x.token_floats(t, stage, which) + n * 8 + t % 4 * 2;
        return {{at[0], at[1]}};
    }

    // Gives scores the unit of which weights are powers of 2.
    HPC_DEVICE void scale(const AttendItem& x, int t, int stage) {
        const bool capped = x.a.layer.softcap > 0.0f;
        const float in_log2 = capped ? 1.0f : kLog2E, unit = x.a.layer.scale * in_log2;
        HPC_UNROLL
        for (int n = 0; n < 2; ++n) {
            Two scales{{1.0f, 1.0f}}, middles{};
            if constexpr (Num::kScaled) scales = floats_of(x, t, stage, kScaleOfK, n);
            if constexpr (K::kMiddle) middles = floats_of(x, t, stage, kMiddleOfK, n);
            HPC_UNROLL
            for (int j = 0; j < 4; ++j) {
                s[t].v[n][j] *= unit * scales.v[j % 2];
                if constexpr (K::kMiddle)
                    s[t].v[n][j] += x.shared<float>(x.at.q_sums)[row_of(t, j / 2)] * in_log2 * middles.v[j % 2];
            }
        }
        for (int i = 0; capped && i < 8; ++i) {
            float& own = s[t].v[i / 4][i % 4];
            own = log2_score(x.a.layer, own);
        }
    }

    HPC_DEVICE void mask(const AttendItem& x, int t, int base) {
        HPC_UNROLL
        for (int i = 0; i < 2; ++i) {
            const Span seen = x.seen(row_of(t, i));
            HPC_UNROLL
            for (int j = 0; j < 4; ++j) {
                const int position = base + t / kWarp * kSlice + j / 2 * 8 + t % 4 * 2 + j % 2;
                if (position < seen.low || position >= seen.high) score_of(s[t], i, j) = -infinity();
            }
        }
    }
};

}  // namespace hpcdecode
