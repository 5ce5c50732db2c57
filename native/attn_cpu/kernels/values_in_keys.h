// V units made of K units, for layers whose values are the first elements of K.
//
// A block of 16 tokens and 16 dims is a square of units: of K with the dims along its units and the tokens along their
// lanes, of V the other way. Its transpose costs a few shuffles a unit, once a chunk for all query rows.
#pragma once
#include "tiles.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

// Copies one element after the other.
template <class S>
inline void transpose_plain(const uint8_t* k, size_t k_step, uint8_t* v, size_t v_step) {
    constexpr size_t kElement = S::kUnitBytes / (S::kSteps * kTile);
    for (int token = 0; token < kTile; ++token)
        for (int d = 0; d < kTile; ++d)
            __builtin_memcpy(v + token / S::kSteps * v_step + S::offset(d, token % S::kSteps) * kElement,
                             k + d / S::kSteps * k_step + S::offset(token, d % S::kSteps) * kElement, kElement);
}

#ifdef __AVX512BW__
// Swaps bit kBit of the lanes' numbers with the bit that tells two vectors apart.
template <int kBit>
inline void swap_lanes(__m512i& a, __m512i& b) {
    alignas(64) static constexpr auto kIndex = [] {
        struct Index {
            int32_t low[16], high[16];
        } index{};
        for (int i = 0; i < 16; ++i) {
            index.low[i] = i & kBit ? 16 + (i ^ kBit) : i;
            index.high[i] = i & kBit ? 16 + i : i | kBit;
        }
        return index;
    }();
    const __m512i low = _mm512_permutex2var_epi32(a, _mm512_loadu_si512(kIndex.low), b);
    b = _mm512_permutex2var_epi32(a, _mm512_loadu_si512(kIndex.high), b);
    a = low;
}

// Swaps all bits of the vectors' numbers with the highest bits of the lanes'.
template <int kVectors, int kHalf = 1>
inline void swap_all(__m512i* x) {
    if constexpr (kHalf < kVectors) {
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i)
            if ((i & kHalf) == 0) swap_lanes<16 / kVectors * kHalf>(x[i], x[i + kHalf]);
        swap_all<kVectors, 2 * kHalf>(x);
    }
}

// Transposes the elements of a word with the words of a group: those of two words of two, or of four words of four.
template <int kElements>
inline __m512i turn_words(__m512i x) {
    static_assert(kElements == 2 || kElements == 4);
    const __m128i order = kElements == 2 ? _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)
                                         : _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(order));
}

// kElements: of a word of four bytes. A unit has 64 bytes, or 128 of two steps.
template <int kElements>
inline void transpose_words(const uint8_t* k, size_t k_step, uint8_t* v, size_t v_step) {
    constexpr int kVectors = kTile / kElements, kOfUnit = kElements == 1 ? 2 : 1;
    __m512i x[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) x[i] = _mm512_loadu_si512(k + i / kOfUnit * k_step + i % kOfUnit * 64);
    swap_all<kVectors>(x);
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
        if constexpr (kElements > 1) x[i] = turn_words<kElements>(x[i]);
        _mm512_storeu_si512(v + i / kOfUnit * v_step + i % kOfUnit * 64, x[i]);
    }
}

inline void transpose(StoreF32, const uint8_t* k, size_t k_step, uint8_t* v, size_t v_step) {
    transpose_words<1>(k, k_step, v, v_step);
}
inline void transpose(StoreBF16, const uint8_t* k, size_t k_step, uint8_t* v, size_t v_step) {
    transpose_words<2>(k, k_step, v, v_step);
}
inline void transpose(StoreI8, const uint8_t* k, size_t k_step, uint8_t* v, size_t v_step) {
    transpose_words<4>(k, k_step, v, v_step);
}
#endif

template <class S>
inline void transpose(S, const uint8_t* k, size_t k_step, uint8_t* v, size_t v_step) {
    transpose_plain<S>(k, k_step, v, v_step);
}

// Makes V units of the tiles' K units, and lets the tiles find them. Those of tokens that no row sees are zeros.
// made: Memory for the V units of a chunk.
template <class S>
inline void lay_values(KvStore<S>, const HeadLayout& l, uint8_t* made, Tiles& tiles) {
    const int columns = l.v_pad / kTile;
    tiles.v_column = static_cast<size_t>(kChunk / S::kSteps) * S::kUnitBytes;
    tiles.v_tile = static_cast<size_t>(kTile / S::kSteps) * S::kUnitBytes;
    for (int t = 0; t < kTilesPerChunk; ++t) tiles.v[t] = made;
    for (int first = 0; first < columns; first += S::kTurn) {
        const int side = columns - first < S::kTurn ? columns - first : S::kTurn;
        for (int t = 0; t < kTilesPerChunk; ++t)
            for (int c = 0; c < side; ++c) {
                const uint8_t* k = tiles.k[t] + static_cast<size_t>(first + c) * (kTile / S::kSteps) * tiles.k_step;
                uint8_t* v = made + first * tiles.v_column + t * tiles.v_tile * side + c * S::kUnitBytes;
                if (t >= tiles.first && t < tiles.last) {
                    transpose(S(), k, tiles.k_step, v, side * S::kUnitBytes);
                } else {
                    for (int u = 0; u < kTile / S::kSteps; ++u)
                        __builtin_memset(v + u * side * S::kUnitBytes, 0, S::kUnitBytes);
                }
            }
    }
}

// K and V of two forms are not the same elements; such layers are refused.
template <class K, class V>
inline void lay_values(KvStore<K, V>, const HeadLayout&, uint8_t*, Tiles&) {}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
