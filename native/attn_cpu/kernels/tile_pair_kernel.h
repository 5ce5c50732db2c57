// Scores and weighted values of bfloat16 by tile products (AMX_BF16), for up to 16 query rows at the price of one.
//
// A tall pass has 32 rows, two tiles of them by two tiles of K or of V, so that each tile that is loaded takes part in
// two products. Products of 32 tokens round in another way than those of 16, so a layer has tall passes alone, or none.
#pragma once
#include "bf16_kernel.h"
#include "tile_kernel.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

template <class Store>
struct TilePairKernel : TileKernel<PairKernel<Store>, 16, 1> {
    using Vectors = PairKernel<Store>;
    using Elements = typename Store::K;  // and V
    static constexpr int kFewRows = 3;

    // Returns whether K is cut into whole and half tiles and there are enough rows; else `Vectors` attends.
    static bool fits(const HeadLayout& l, int group) { return group > kFewRows && l.k_pad % 16 == 0; }

    static constexpr int kTallRows = 32;
    // Returns whether a layer has tall passes: its values are made of K, and all its rows are in whole passes.
    static bool tall(const HeadLayout& l, int group) {
        return l.latent && group % kTallRows == 0 && l.k_pad % 32 == 0 && l.v_pad % 32 == 0;
    }

    // q[row][dim]
    template <int MR>
    static void prepare(const AttendArgs& a, int head, int row0, uint8_t* q) {
        for (int r = 0; r < MR; ++r)
            Vectors::template prepare<1>(a, head, row0 + r, q + static_cast<size_t>(r) * a.kv.layout->k_pad * 2);
    }

    template <int TT, int T = 0>
    static inline void add_scores(const Tiles& tiles, int first, int unit, size_t step, bool half, Ahead& ahead) {
        const uint8_t* k = tiles.k[first + T] + unit * tiles.k_step;
        if (half) {
            ahead.advance<true, 8 * Elements::kUnitBytes>();
            tile_load<7>(k, step);
            tile_add_pairs<T, 6, 7>();
        } else {
            ahead.advance<true, 16 * Elements::kUnitBytes>();
            tile_load<5>(k, step);
            tile_add_pairs<T, 4, 5>();
        }
        if constexpr (T + 1 < TT) add_scores<TT, T + 1>(tiles, first, unit, step, half, ahead);
    }

    template <int MR, int TT>
    static inline void score_pass(const Tiles& tiles, int first, const uint8_t* q, int k_pad, Ahead& ahead, float* s) {
        if constexpr (MR == kTallRows) return tall_scores(tiles, first, q, k_pad, ahead, s);
        scores<TT>(tiles, first, q, k_pad, ahead, s);
    }
    template <int MR, int NC>
    static inline void value_pass(const Tiles& tiles, int first, const float* p, Ahead& ahead, float* acc, int v_pad) {
        const size_t row = static_cast<size_t>(v_pad) * sizeof(float);
        if constexpr (MR == kTallRows) return tall_values(tiles, first, p, ahead, acc + first * kTile, row);
        values<NC>(tiles, first, p, ahead, acc + first * kTile, row);
    }

  private:
    static constexpr size_t kWeights = kChunk * sizeof(float);  // bytes of a row of scores and of weights

    static inline void add_tall() {
        tile_add_pairs<0, 4, 6>();
        tile_add_pairs<1, 5, 6>();
        tile_add_pairs<2, 4, 7>();
        tile_add_pairs<3, 5, 7>();
    }

    // Stores the products of 32 rows with 32 columns.
    static inline void store_tall(float* c, size_t row) {
        float* below = c + 16 * row / sizeof(float);
        tile_store<0>(c, row);
        tile_store<1>(below, row);
        tile_store<2>(c + kTile, row);
        tile_store<3>(below + kTile, row);
    }

    static __attribute__((noinline)) void tall_scores(const Tiles& tiles, int first, const uint8_t* q, int k_pad,
                                                      Ahead& shared, float* s) {
        const size_t row = static_cast<size_t>(k_pad) * 2;
        Ahead ahead = shared;
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
        for (int unit = 0; unit < k_pad / 2; unit += 16) {
            ahead.advance<true, 32 * Elements::kUnitBytes>();
            tile_load<4>(q + unit * 4, row);
            tile_load<5>(q + unit * 4 + 16 * row, row);
            tile_load<6>(tiles.k[first] + unit * tiles.k_step, tiles.k_step);
            tile_load<7>(tiles.k[first + 1] + unit * tiles.k_step, tiles.k_step);
            add_tall();
        }
        store_tall(s, kWeights);
        shared = ahead;
    }

    // Two columns of V of all tokens of a chunk; where no row sees any, weights are zero.
    static __attribute__((noinline)) void tall_values(const Tiles& tiles, int first, const float* p, Ahead& shared,
                                                      float* acc, size_t row) {
        constexpr size_t kStep = 2 * Elements::kUnitBytes;
        const uint8_t* weights = reinterpret_cast<const uint8_t*>(p);
        const uint8_t* v = tiles.v[0] + first * tiles.v_column;
        float* below = acc + 16 * row / sizeof(float);
        Ahead ahead = shared;
        tile_load<0>(acc, row);
        tile_load<1>(below, row);
        tile_load<2>(acc + kTile, row);
        tile_load<3>(below + kTile, row);
        for (int half = 0; half < 2; ++half, weights += 64, v += 16 * kStep) {
            ahead.advance<true, 32 * Elements::kUnitBytes>();
            tile_load<4>(weights, kWeights);
            tile_load<5>(weights + 16 * kWeights, kWeights);
            tile_load<6>(v, kStep);
            tile_load<7>(v + Elements::kUnitBytes, kStep);
            add_tall();
        }
        store_tall(acc, row);
        shared = ahead;
    }

    template <int TT>
    static __attribute__((noinline)) void scores(const Tiles& tiles, int first, const uint8_t* q, int k_pad,
                                                 Ahead& shared, float* s) {
        const size_t row = static_cast<size_t>(k_pad) * 2;
        Ahead ahead = shared;
        tile_zero<0>();
        if constexpr (TT > 1) tile_zero<1>();
        int unit = 0;
        for (; unit + 16 <= k_pad / 2; unit += 16) {
            tile_load<4>(q + unit * 4, row);
            add_scores<TT>(tiles, first, unit, tiles.k_step, false, ahead);
        }
        if (unit < k_pad / 2) {
            tile_load<6>(q + unit * 4, row);
            add_scores<TT>(tiles, first, unit, tiles.k_step, true, ahead);
        }
        tile_store<0>(s, kChunk * sizeof(float));
        if constexpr (TT > 1) tile_store<1>(s + kTile, kChunk * sizeof(float));
        shared = ahead;
    }

    template <int NC>
    static __attribute__((noinline)) void values(const Tiles& tiles, int first, const float* p, Ahead& shared,
                                                 float* acc, size_t row) {
        Ahead ahead = shared;
        tile_load<0>(acc, row);
        if constexpr (NC > 1) tile_load<1>(acc + kTile, row);
        for (int t = tiles.first; t < tiles.last; ++t) {
            const Columns<Elements, NC> v(tiles, t, first);
            constexpr size_t kStep = Columns<Elements, NC>::kSide * Elements::kUnitBytes;
            ahead.advance<true, 8 * NC * Elements::kUnitBytes>();
            tile_load<6>(reinterpret_cast<const uint16_t*>(p) + t * kTile, kChunk * sizeof(float));
            tile_load<7>(v.unit(0, 0), kStep);
            tile_add_pairs<0, 6, 7>();
            if constexpr (NC > 1) {
                tile_load<7>(v.unit(0, 1), kStep);
                tile_add_pairs<1, 6, 7>();
            }
        }
        tile_store<0>(acc, row);
        if constexpr (NC > 1) tile_store<1>(acc + kTile, row);
        shared = ahead;
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
