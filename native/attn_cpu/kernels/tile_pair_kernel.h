// Scores and weighted values of bfloat16 by tile products (AMX_BF16), for up to 16 query rows at the price of one.
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
        scores<TT>(tiles, first, q, k_pad, ahead, s);
    }
    template <int MR, int NC>
    static inline void value_pass(const Tiles& tiles, int first, const float* p, Ahead& ahead, float* acc, int v_pad) {
        values<NC>(tiles, first, p, ahead, acc + first * kTile, static_cast<size_t>(v_pad) * sizeof(float));
    }

  private:
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
