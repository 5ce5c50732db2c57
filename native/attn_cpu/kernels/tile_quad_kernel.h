// Scores and weighted values of int8 and int4 by tile products of bytes (AMX_INT8).
//
// Queries and weights are the whole numbers of quad_kernel.h. The high and the low bytes of a row are two rows of a
// tile.
#pragma once
#include "quad_kernel.h"
#include "tile_kernel.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

// 16 quads of 16 lanes, as rows of a tile.
inline const uint8_t* tile_rows(StoreI8, const uint8_t* units, int, uint8_t*) { return units; }
inline const uint8_t* tile_rows(StoreI4, const uint8_t* units, int rows, uint8_t* room) {
    for (int i = 0; i < rows; i += 2) {
        _mm512_store_si512(room + i * 64, v_quad(StoreI4(), units + i * 32, 0));
        _mm512_store_si512(room + i * 64 + 64, v_quad(StoreI4(), units + i * 32, 1));
    }
    return room;
}

template <class Store>
struct TileQuadKernel : TileKernel<QuadKernel<Store>, 8, 2> {
    using Vectors = QuadKernel<Store>;
    using TileKernel<Vectors, 8, 2>::kRows;
    static constexpr int kFewRows = 3;
    static constexpr int kDims = 64;                                            // of a tile of K
    static constexpr size_t kRowBytes = Store::kUnitBytes * 4 / Store::kSteps;  // of the cache, in a row of a tile
    static constexpr size_t kWeights = kChunk * sizeof(float) / 2;  // from high to low bytes, and to the next row

    // Returns whether K is cut into whole and half tiles, V lies in tiles and there are enough rows; else `Vectors`
    // attends.
    static bool fits(const HeadLayout& l, int group) {
        return group > kFewRows && l.k_pad % (kDims / 2) == 0 && l.run_tokens == kChunk;
    }

    // Writes for every row [k_pad] high bytes and the scale, then from 2 * k_pad on [k_pad] low bytes.
    template <int MR>
    static void prepare(const AttendArgs& a, int head, int row0, uint8_t* dst) {
        const size_t k_pad = a.kv.layout->k_pad;
        for (int r = 0; r < MR; ++r, dst += 4 * k_pad) {
            const int64_t base = query_at(a, head, row0 + r);
            const float scale = Vectors::split_row(a, base, dst, 4, 2 * k_pad, static_cast<int>(k_pad) / 4).scale;
            __builtin_memcpy(dst + k_pad, &scale, 4);
        }
    }

    template <int TT, int T = 0>
    static inline void add_scores(const Tiles& tiles, int first, int dim, bool half, Ahead& ahead, uint8_t* room) {
        const uint8_t* k = tiles.k[first + T] + dim / Store::kSteps * Store::kUnitBytes;
        if (half) {
            ahead.advance<true, 8 * kRowBytes>();
            tile_load<7>(tile_rows(Store(), k, 8, room), 64);
            tile_add_quads<T, 6, 7>();
        } else {
            ahead.advance<true, 16 * kRowBytes>();
            tile_load<5>(tile_rows(Store(), k, 16, room), 64);
            tile_add_quads<T, 4, 5>();
        }
        if constexpr (T + 1 < TT) add_scores<TT, T + 1>(tiles, first, dim, half, ahead, room);
    }

    template <int MR, int TT>
    static __attribute__((noinline)) void score_pass(const Tiles& tiles, int first, const uint8_t* q, int k_pad,
                                                     Ahead& shared, float* s) {
        Ahead ahead = shared;
        alignas(64) uint8_t room[16 * 64];
        tile_zero<0>();
        if constexpr (TT > 1) tile_zero<1>();
        int dim = 0;
        for (; dim + kDims <= k_pad; dim += kDims) {
            tile_load<4>(q + dim, 2 * k_pad);
            add_scores<TT>(tiles, first, dim, false, ahead, room);
        }
        if (dim < k_pad) {
            tile_load<6>(q + dim, 2 * k_pad);
            add_scores<TT>(tiles, first, dim, true, ahead, room);
        }
        shared = ahead;
        int32_t sums[TT][2 * kRows][kTile];
        tile_store<0>(sums[0], sizeof sums[0][0]);
        if constexpr (TT > 1) tile_store<1>(sums[TT - 1], sizeof sums[0][0]);
        for (int r = 0; r < MR; ++r) {
            float scale;
            __builtin_memcpy(&scale, q + static_cast<size_t>(4 * r + 1) * k_pad, 4);
            for (int t = 0; t < TT; ++t) {
                const F high = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums[t][2 * r]));
                const F low = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums[t][2 * r + 1]));
                vstore(s + r * kChunk + t * kTile, vmul(vfma(high, vset(256.0f), low), vset(scale)));
            }
        }
    }

    // out: 64 high bytes, the scale; from kWeights on 64 low bytes. Quads come packed (as i * 4 + t) and go in order.
    static inline void store(const F* p, float* out) {
        uint8_t* bytes = reinterpret_cast<uint8_t*>(out);
        __m512i packed[2];
        out[kChunk / 4] = Vectors::packed(p, packed);
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        for (int i = 0; i < 2; ++i)
            _mm512_storeu_si512(bytes + i * kWeights, _mm512_permutexvar_epi32(order, packed[i]));
    }
    static inline void emit(const F* p, float* sums, float* out) {
        add_weights(p, sums);
        store(p, out);
    }

    template <int MR, int NC>
    static __attribute__((noinline)) void value_pass(const Tiles& tiles, int first, const float* p, Ahead& shared,
                                                     float* acc, int v_pad) {
        Ahead ahead = shared;
        alignas(64) uint8_t room[16 * 64];
        ahead.advance<true, 16 * NC * kRowBytes>();
        tile_load<4>(p, kWeights);
        add_values<0>(tiles.v[0] + first * tiles.v_column, room);
        if constexpr (NC > 1) add_values<1>(tiles.v[0] + (first + 1) * tiles.v_column, room);
        shared = ahead;
        int32_t sums[NC][2 * kRows][kTile];
        tile_store<0>(sums[0], sizeof sums[0][0]);
        if constexpr (NC > 1) tile_store<1>(sums[NC - 1], sizeof sums[0][0]);
        for (int r = 0; r < MR; ++r) {
            const F scale = vset(p[r * kChunk + kChunk / 4]);
            for (int c = 0; c < NC; ++c) {
                float* o = acc + r * v_pad + (first + c) * kTile;
                const __m512i high = _mm512_loadu_si512(sums[c][2 * r]), low = _mm512_loadu_si512(sums[c][2 * r + 1]);
                const F sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
                vstore(o, vfma(sum, scale, vload(o)));
            }
        }
    }

    template <int C>
    static inline void add_values(const uint8_t* column, uint8_t* room) {
        tile_zero<C>();
        tile_load<5>(tile_rows(Store(), column, 16, room), 64);
        tile_add_unsigned_quads<C, 4, 5>();
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
