// Gathers tokens that lie in rows into a run of 64, as kernels read it.
//
// Where an instruction set has shuffles for it, words of four bytes of 16 rows are transposed at once.
#pragma once
#include "append.h"
#include "values_in_keys.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

// Whether dims of a word of four bytes lie side by side in a unit: one of float32, two of bfloat16, four of int8.
template <class K>
constexpr bool kHasWords = false;
#ifdef __AVX512BW__
template <>
constexpr bool kHasWords<StoreF32> = true;
template <>
constexpr bool kHasWords<StoreBF16> = true;
template <>
constexpr bool kHasWords<StoreI8> = true;

// Copies the first dims of K of 16 rows to their units, in parts of 64 bytes of every row; returns how many they are.
template <class K>
inline int turn_keys(const HeadLayout& l, const uint8_t* const* rows, uint8_t* run, int token) {
    constexpr int kElement = K::kUnitBytes / kTile / K::kSteps, kDims = 4 / kElement, kWords = K::kSteps / kDims;
    uint8_t* unit = run + k_unit_at<K>(l, token, 0);
    const size_t step = static_cast<size_t>(k_turn<K>(l)) * K::kUnitBytes;
    int word = 0;
    for (; (word + kTile) * kDims <= l.k_dim; word += kTile) {
        __m512i x[kTile];
#pragma GCC unroll 16
        for (int i = 0; i < kTile; ++i) x[i] = _mm512_loadu_si512(rows[i] + word * 4);
        swap_all<kTile>(x);
#pragma GCC unroll 16
        for (int i = 0; i < kTile; ++i)
            _mm512_storeu_si512(unit + (word + i) / kWords * step + (word + i) % kWords * 64, x[i]);
    }
    return word * kDims;
}
#else
template <class K>
inline int turn_keys(const HeadLayout&, const uint8_t* const*, uint8_t*, int) {
    return 0;
}
#endif

// Gathers positions [begin, end) of one chunk, or those that `chosen` has in their place; `seen` are gathered in all.
template <class Store>
inline void gather_run(const HeadView& kv, int64_t begin, int64_t end, int64_t seen, const int32_t* chosen,
                       uint8_t* run) {
    using K = typename Store::K;
    const HeadLayout& l = *kv.layout;
    if (end - begin < kChunk || l.k_dim < l.k_pad || !l.latent) __builtin_memset(run, 0, l.run_bytes);
    if constexpr (kHasWords<K>) {
        constexpr int kElement = K::kUnitBytes / kTile / K::kSteps;
        for (; l.latent && begin + kTile <= end; begin += kTile) {
            const uint8_t* rows[kTile];
            for (int i = 0; i < kTile; ++i)
                rows[i] = Append<Store>::row_at(kv, chosen != nullptr ? chosen[begin + i] : begin + i);
            for (int64_t p = begin + kTile; p < begin + 2 * kTile && p < seen; ++p) {
                const uint8_t* next = Append<Store>::row_at(kv, chosen != nullptr ? chosen[p] : p);
                for (size_t line = 0; line < l.row_bytes; line += 64) __builtin_prefetch(next + line);
            }
            const int token = static_cast<int>(begin % kChunk), turned = turn_keys<K>(l, rows, run, token);
            for (int i = 0; i < kTile; ++i) {
                Append<Store>::place_k(l, rows[i] + turned * kElement, turned, l.k_dim, run, token + i);
                Append<Store>::scales_into_run(l, rows[i], run, token + i);
            }
        }
    }
    for (; begin < end; ++begin) {
        const uint8_t* row = Append<Store>::row_at(kv, chosen != nullptr ? chosen[begin] : begin);
        Append<Store>::row_into_run(l, row, run, static_cast<int>(begin % kChunk));
    }
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
