// Scores and weighted values by bfloat16 pair products (AVX512_BF16).
//
// Queries and weights are rounded to bfloat16. The sum of weights is that of the rounded ones, so that equal values
// come out exactly.
#pragma once
#include "tiles.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

template <class Store>
struct PairKernel : VectorKernel {
    using Storage = Store;
    using K = typename Store::K;
    using V = typename Store::V;
    static constexpr size_t kQueryBytes = 2;  // per element
    static constexpr int kSums = 1;           // accumulators of a row and unit
    static constexpr int kRows = kAccs / 2;   // of one pass, for two tiles at once
    static inline F exp2(F t) { return vexp2_coarse(t); }
    static inline __m512bh pairs(const uint8_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
    static inline __m512bh spread(uint32_t pair) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)); }

    // q[unit][row] pairs
    template <int MR>
    static void prepare(const AttendArgs& a, int head, int row0, uint8_t* dst) {
        uint16_t* q = reinterpret_cast<uint16_t*>(dst);
        const HeadLayout& l = *a.kv.layout;
        for (int r = 0; r < MR; ++r) {
            const int64_t base = query_at(a, head, row0 + r);
            if (a.type == ActType::kBF16 && l.k_dim == l.k_pad) {
                const uint16_t* src = static_cast<const uint16_t*>(a.q) + base;
                for (int u = 0; u < l.k_dim / 2; ++u) __builtin_memcpy(q + (u * MR + r) * 2, src + u * 2, 4);
                continue;
            }
            for (int d = 0; d < l.k_pad; ++d)
                q[((d / 2) * MR + r) * 2 + d % 2] = d < l.k_dim ? bf16_of(load_act(a.q, a.type, base + d)) : 0;
        }
    }

    template <int MR, int TT>
    static __attribute__((noinline)) void score_pass(const Tiles& tiles, int first, const uint8_t* rows, int k_pad,
                                                     Ahead& shared, float* s) {
        const uint32_t* q = reinterpret_cast<const uint32_t*>(rows);
        const int units = k_pad / K::kSteps;
        Ahead ahead = shared;
        F acc[MR][TT];
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < TT; ++t) acc[r][t] = vzero();
        }
        for (int u = 0; u < units; ++u, q += MR) {
            ahead.advance<Store::kScaled || (MR > kPrefetching.unaided_rows), TT * K::kUnitBytes>();
            __m512bh x[TT];
#pragma GCC unroll 4
            for (int t = 0; t < TT; ++t) x[t] = pairs(tiles.k[first + t] + u * tiles.k_step);
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) {
                const __m512bh y = spread(q[r]);
#pragma GCC unroll 4
                for (int t = 0; t < TT; ++t) acc[r][t] = _mm512_dpbf16_ps(acc[r][t], x[t], y);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < TT; ++t) vstore(s + r * kChunk + t * W, acc[r][t]);
        }
        shared = ahead;
    }

    // out holds bfloat16 pairs, 64 tokens in the first 128 bytes of the row
    static inline void store(const F* p, float* out) {
        _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
        _mm512_storeu_si512(out + 16, (__m512i)_mm512_cvtne2ps_pbh(p[3], p[2]));
    }

    static inline void emit(const F* p, float* sums, float* out) {
        const __m512bh ones = spread(0x3f803f80u);
        store(p, out);
        const F lo = _mm512_dpbf16_ps(vload(sums), (__m512bh)_mm512_loadu_si512(out), ones);
        vstore(sums, _mm512_dpbf16_ps(lo, (__m512bh)_mm512_loadu_si512(out + 16), ones));
    }

    template <int MR, int NC>
    static __attribute__((noinline)) void value_pass(const Tiles& tiles, int first, const float* p, Ahead& shared,
                                                     float* acc, int v_pad) {
        Ahead ahead = shared;
        acc += first * kTile;
        F o[MR][NC];
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int c = 0; c < NC; ++c) o[r][c] = vload(acc + r * v_pad + c * W);
        }
        for (int t = tiles.first; t < tiles.last; ++t) {
            const Columns<V, NC> v(tiles, t, first);
            const uint32_t* w = reinterpret_cast<const uint32_t*>(p) + t * kTile / 2;
            for (int u = 0; u < kTile / 2; ++u) {
                ahead.advance<Store::kScaled || (MR > kPrefetching.unaided_rows), NC * V::kUnitBytes>();
                __m512bh x[NC];
#pragma GCC unroll 16
                for (int c = 0; c < NC; ++c) x[c] = pairs(v.unit(u, c));
#pragma GCC unroll 16
                for (int r = 0; r < MR; ++r) {
                    const __m512bh y = spread(w[r * kChunk + u]);
#pragma GCC unroll 16
                    for (int c = 0; c < NC; ++c) o[r][c] = _mm512_dpbf16_ps(o[r][c], x[c], y);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
            for (int c = 0; c < NC; ++c) vstore(acc + r * v_pad + c * W, o[r][c]);
        }
        shared = ahead;
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
