// Scores and weighted values in float32 over any stored type.
#pragma once
#include "tiles.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

inline void add_weights(const F* p, float* sums) {
    for (int j = 0; j < kVecs; ++j) {
        F x = vload(sums + j * W);
        for (int t = 0; t < kTilesPerChunk; ++t) x = vadd(x, p[t * kVecs + j]);
        vstore(sums + j * W, x);
    }
}

template <class Store>
struct PlainKernel : VectorKernel {
    using Storage = Store;
    static constexpr size_t kQueryBytes = 4;  // per element
    static constexpr int kSums = kVecs;       // accumulators of a row and unit
    using K = typename Store::K;
    using V = typename Store::V;
    static inline F exp2(F t) { return vexp2(t); }

    // q[unit][row][2]
    template <int MR>
    static void prepare(const AttendArgs& a, int head, int row0, uint8_t* dst) {
        float* q = reinterpret_cast<float*>(dst);
        const HeadLayout& l = *a.kv.layout;
        for (int r = 0; r < MR; ++r) {
            const int64_t base = query_at(a, head, row0 + r);
            for (int d = 0; d < l.k_pad; ++d)
                q[((d / 2) * MR + r) * 2 + d % 2] = d < l.k_dim ? load_act(a.q, a.type, base + d) : 0.0f;
        }
    }

    // Scores of MR rows against tiles `first` to first + TT.
    template <int MR, int TT>
    static inline void score_pass(const Tiles& tiles, int first, const uint8_t* rows, int k_pad, Ahead& ahead,
                                  float* s) {
        const float* q = reinterpret_cast<const float*>(rows);
        const int units = k_pad / K::kSteps;
        F acc[MR][TT * kVecs];
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < TT * kVecs; ++t) acc[r][t] = vzero();
        }
        for (int u = 0; u < units; ++u, q += MR * K::kSteps) {
            ahead.advance<Store::kScaled || (MR > kPrefetching.unaided_rows), TT * K::kUnitBytes>();
#pragma GCC unroll 4
            for (int t = 0; t < TT; ++t) {
#pragma GCC unroll 4
                for (int j = 0; j < kVecs; ++j) {
#pragma GCC unroll 4
                    for (int pair = 0; pair < K::kSteps / 2; ++pair) {
                        F a, b;
                        K::load(tiles.k[first + t] + u * tiles.k_step, j, pair, a, b);
                        const float* y = q + pair * MR * 2;
#pragma GCC unroll 8
                        for (int r = 0; r < MR; ++r) {
                            F& x = acc[r][t * kVecs + j];
                            x = vfma(b, vset(y[r * 2 + 1]), vfma(a, vset(y[r * 2]), x));
                        }
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < TT * kVecs; ++t) vstore(s + r * kChunk + t * W, acc[r][t]);
        }
    }

    static inline void store(const F* p, float* out) {
        for (int i = 0; i < kTilesPerChunk * kVecs; ++i) vstore(out + i * W, p[i]);
    }

    // Adds the weights of one row to its 16 partial sums and leaves them as `value_pass` reads them.
    static inline void emit(const F* p, float* sums, float* out) {
        add_weights(p, sums);
        store(p, out);
    }

    // Adds to columns `first` to first + NC, of 16 dims each; `acc` is that of dim 0.
    template <int MR, int NC>
    static inline void value_pass(const Tiles& tiles, int first, const float* p, Ahead& ahead, float* acc, int v_pad) {
        acc += first * kTile;
        F o[MR][NC * kVecs];
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int c = 0; c < NC * kVecs; ++c) o[r][c] = vload(acc + r * v_pad + c * W);
        }
        for (int t = tiles.first; t < tiles.last; ++t) {
            const Columns<V, NC> v(tiles, t, first);
            const float* w = p + t * kTile;
            for (int u = 0; u < kTile / V::kSteps; ++u, w += V::kSteps) {
                ahead.advance<Store::kScaled || (MR > kPrefetching.unaided_rows), NC * V::kUnitBytes>();
#pragma GCC unroll 8
                for (int c = 0; c < NC; ++c) {
#pragma GCC unroll 4
                    for (int j = 0; j < kVecs; ++j) {
#pragma GCC unroll 4
                        for (int pair = 0; pair < V::kSteps / 2; ++pair) {
                            F a, b;
                            V::load(v.unit(u, c), j, pair, a, b);
                            const float* y = w + pair * 2;
#pragma GCC unroll 8
                            for (int r = 0; r < MR; ++r) {
                                F& x = o[r][c * kVecs + j];
                                x = vfma(b, vset(y[r * kChunk + 1]), vfma(a, vset(y[r * kChunk]), x));
                            }
                        }
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int c = 0; c < NC * kVecs; ++c) vstore(acc + r * v_pad + c * W, o[r][c]);
        }
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
