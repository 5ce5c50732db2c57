// Prompts held as pairs of bfloat16, multiplied by tile products (AMX_BF16). The words of a prompt's tile and the rows
// of weights are operands of these products as they lie.
#pragma once
#include "prefill_pairs.h"
#include "tile_kernel.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

struct TilePairWords : PairWords {
    static constexpr int kRows = 32;  // of two tiles
    static constexpr int kWordBlock = 16;
    struct Unit : TileUnit {
        Unit() { configure_gemm(16, 16); }
    };

    // Multiplies as VectorWords does. The units beyond `units`, up to a multiple of 16, are zero in a or in b.
    template <bool kAdd>
    static void multiply(const Word* a, int64_t a_stride, const Word* b, int64_t b_stride, int units, float* c,
                         int64_t c_stride, int vecs) {
        for (; vecs >= 2; vecs -= 2, b += 32, c += 32)
            panel<kAdd, true>(a, a_stride * 4, b, b_stride, units, c, c_stride);
        if (vecs > 0) panel<kAdd, false>(a, a_stride * 4, b, b_stride, units, c, c_stride);
    }

    template <bool kAdd, bool kTwo>
    static __attribute__((noinline)) void panel(const Word* a, size_t a_bytes, const Word* b, int64_t b_stride,
                                                int units, float* c, int64_t c_stride) {
        float* below = c + 16 * c_stride;
        const size_t c_bytes = c_stride * 4;
        start<kAdd, 0>(c, c_bytes);
        start<kAdd, 1>(below, c_bytes);
        if constexpr (kTwo) start<kAdd, 2>(c + 16, c_bytes);
        if constexpr (kTwo) start<kAdd, 3>(below + 16, c_bytes);
        for (int u = 0; u < units; u += 16, a += 16, b += 16 * b_stride) {
            tile_load<4>(a, a_bytes);
            tile_load<6>(b, b_stride * 4);
            tile_add_pairs<0, 4, 6>();
            tile_load<5>(a + 16 * a_bytes / 4, a_bytes);
            tile_add_pairs<1, 5, 6>();
            if constexpr (kTwo) {
                tile_load<7>(b + 16, b_stride * 4);
                tile_add_pairs<2, 4, 7>();
                tile_add_pairs<3, 5, 7>();
            }
        }
        tile_store<0>(c, c_bytes);
        tile_store<1>(below, c_bytes);
        if constexpr (kTwo) tile_store<2>(c + 16, c_bytes);
        if constexpr (kTwo) tile_store<3>(below + 16, c_bytes);
    }

    template <bool kAdd, int T>
    static inline void start(const float* c, size_t bytes) {
        if constexpr (kAdd) {
            tile_load<T>(c, bytes);
        } else {
            tile_zero<T>();
        }
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
