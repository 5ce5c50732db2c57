// Scores and weighted values of whole numbers by tile products of bytes (AMX_INT8).
//
// Queries and weights are the whole numbers of quad_kernel.h. Each byte of them is in a row of its own of a tile.
#pragma once
#include "quad_kernel.h"
#include "tile_kernel.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

// Quads of 16 lanes, as rows of a tile.
struct TileRows {
    const uint8_t* at;
    size_t stride;
};

// Return `rows` quads of units that lie `step` bytes apart. room: For 16 rows.
inline TileRows tile_rows(StoreI8, const uint8_t* units, size_t step, int, uint8_t*) { return {units, step}; }
inline TileRows tile_rows(StoreI4, const uint8_t* units, size_t step, int rows, uint8_t* room) {
    for (int i = 0; i < rows; i += 2, units += step) {
        _mm512_store_si512(room + i * 64, v_quad(StoreI4(), units, 0));
        _mm512_store_si512(room + i * 64 + 64, v_quad(StoreI4(), units, 1));
    }
    return {room, 64};
}
inline TileRows tile_rows(StoreI6, const uint8_t* units, size_t step, int rows, uint8_t* room) {
    for (int first = 0; first < rows; first += 4, units += step) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            _mm512_store_si512(room + (first + i) * 64,
                               _mm512_sub_epi8(k_quad(StoreI6(), units, i), _mm512_set1_epi8(32)));
    }
    return {room, 64};
}

template <class Store>
struct TileQuadKernel : TileKernel<QuadKernel<Store>, 16 / QuadKernel<Store>::kParts, QuadKernel<Store>::kParts> {
    using Vectors = QuadKernel<Store>;
    static constexpr int kParts = Vectors::kParts, kRows = 16 / kParts;
    static constexpr int kFewRows = 3;
    static constexpr int kDims = 64;  // of a tile of K
    using K = typename Store::K;
    using V = typename Store::V;
    static constexpr size_t kKeyBytes = K::kUnitBytes * 4 / K::kSteps;  // of the cache, in a row of a tile
    static constexpr size_t kValueBytes = V::kUnitBytes * 4 / V::kSteps;
    static constexpr size_t kWeights = kChunk * sizeof(float) / kParts;  // from a part to the next one, or the next row

    // Returns whether K is cut into whole and half tiles, V lies in tiles and there are enough rows; else `Vectors`
    // attends.
    static bool fits(const HeadLayout& l, int group) {
        const bool whole = l.k_pad % (kDims / 2) == 0 && l.k_split % (kDims / 2) == 0;
        return group > kFewRows && whole && l.run_tokens == kChunk;
    }

    // Writes for every row [k_pad] high bytes and the scale, then from 2 * k_pad on [k_pad] low bytes if there are.
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
        const uint8_t* k = tiles.k[first + T] + dim / K::kSteps * tiles.k_step;
        if (half) {
            ahead.advance<true, 8 * kKeyBytes>();
            const TileRows rows = tile_rows(K(), k, tiles.k_step, 8, room);
            tile_load<7>(rows.at, rows.stride);
            tile_add_quads<T, 6, 7>();
        } else {
            ahead.advance<true, 16 * kKeyBytes>();
            const TileRows rows = tile_rows(K(), k, tiles.k_step, 16, room);
            tile_load<5>(rows.at, rows.stride);
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
            tile_load<4>(q + dim, 4 * k_pad / kParts);
            add_scores<TT>(tiles, first, dim, false, ahead, room);
        }
        if (dim < k_pad) {
            tile_load<6>(q + dim, 4 * k_pad / kParts);
            add_scores<TT>(tiles, first, dim, true, ahead, room);
        }
        shared = ahead;
        int32_t sums[TT][kParts * kRows][kTile];
        tile_store<0>(sums[0], sizeof sums[0][0]);
        if constexpr (TT > 1) tile_store<1>(sums[TT - 1], sizeof sums[0][0]);
        for (int r = 0; r < MR; ++r) {
            float scale;
            __builtin_memcpy(&scale, q + static_cast<size_t>(4 * r + 1) * k_pad, 4);
            for (int t = 0; t < TT; ++t) {
                const Parts parts(sums[t][kParts * r]);
                vstore(s + r * kChunk + t * kTile, vmul(Vectors::whole(parts.x), vset(scale)));
            }
        }
    }

    // Neighbouring rows of sums, those of the parts of one number.
    struct Parts {
        __m512i x[kParts];
        explicit Parts(const int32_t* sums) {
            for (int i = 0; i < kParts; ++i) x[i] = _mm512_loadu_si512(sums + i * kTile);
        }
    };

    // out: 64 high bytes, the scale; from kWeights on 64 low bytes if there are. Quads come packed (as i * 4 + t) and
    // go in order.
    static inline void store(const F* p, float* out) {
        uint8_t* bytes = reinterpret_cast<uint8_t*>(out);
        __m512i packed[kParts];
        out[kChunk / 4] = Vectors::packed(p, packed);
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        for (int i = 0; i < kParts; ++i)
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
        ahead.advance<true, 16 * NC * kValueBytes>();
        tile_load<4>(p, kWeights);
        const Columns<V, NC> v(tiles, 0, first);
        constexpr size_t kStep = Columns<V, NC>::kSide * V::kUnitBytes;
        add_values<0>(v.unit(0, 0), kStep, room);
        if constexpr (NC > 1) add_values<1>(v.unit(0, 1), kStep, room);
        shared = ahead;
        int32_t sums[NC][kParts * kRows][kTile];
        tile_store<0>(sums[0], sizeof sums[0][0]);
        if constexpr (NC > 1) tile_store<1>(sums[NC - 1], sizeof sums[0][0]);
        for (int r = 0; r < MR; ++r) {
            const F scale = vset(p[r * kChunk + kChunk / 4]);
            for (int c = 0; c < NC; ++c) {
                float* o = acc + r * v_pad + (first + c) * kTile;
                const Parts parts(sums[c][kParts * r]);
                vstore(o, vfma(Vectors::whole_sum(parts.x), scale, vload(o)));
            }
        }
    }

    template <int C>
    static inline void add_values(const uint8_t* column, size_t step, uint8_t* room) {
        tile_zero<C>();
        const TileRows rows = tile_rows(V(), column, step, 16, room);
        tile_load<5>(rows.at, rows.stride);
        tile_add_unsigned_quads<C, 4, 5>();
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
