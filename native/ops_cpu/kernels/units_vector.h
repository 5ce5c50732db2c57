// The multiply-adds of a GEMM in the compiler's vectors, for AVX2, and for AVX-512 without products of the type.
//
// A word of packed weights gives one or two factors for every output, and a word of a row gives as many values.
#pragma once
#include <immintrin.h>

#include "math.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kVectors = 2, kGroup = 14;  // lanes; vectors of a row; rows whose sums fit registers
#else
constexpr int kWidth = 8, kVectors = 2, kGroup = 6;
#endif

using Floats = float __attribute__((vector_size(kWidth * 4)));
using Ints = int32_t __attribute__((vector_size(kWidth * 4)));
using Shorts = int16_t __attribute__((vector_size(kWidth * 4)));

template <class V>
inline V load_vector(const void* p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

template <class V>
inline void store_vector(void* p, V x) {
    std::memcpy(p, &x, sizeof x);
}

// What sums of float32 have in common.
struct VectorFloatSums {
    static constexpr int kHeads = 1, kXWords = 1;  // kXWords: of a row, to a word of weights
    static constexpr int kWrittenGroups = 4;       // of rows, from which on factors are written out first
    using Sum = Floats;
    using Value = float;
    static Sum add(Sum sum, Value value, Sum factor) { return sum + value * factor; }
    static void finish(float*, const uint32_t*) {}
};

struct VectorFloat32 : VectorFloatSums {
    static constexpr int kParts = 1, kRows = kGroup;  // values of a word; rows of a pass
    template <int>
    static Floats factor(Ints word) {
        return reinterpret_cast<Floats>(word);
    }
};

struct VectorBfloat16 : VectorFloatSums {
    static constexpr int kParts = 2, kRows = kGroup - 1;  // its mask takes a register
    template <int part>
    static Floats factor(Ints word) {
        return reinterpret_cast<Floats>(part == 0 ? word << 16 : word & static_cast<int32_t>(0xffff0000u));
    }
};

// Rows of float32 by the same weights.
struct WidenedBfloat16 : VectorBfloat16 {
    static constexpr int kXWords = 2;
};

// The same by weights of float16.
struct WidenedFloat16 : VectorFloatSums {
    static constexpr int kParts = 2, kRows = kGroup - 1, kXWords = 2, kWrittenGroups = 2;
    template <int part>
    static Floats factor(Ints word) {
        const __m128i lane = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);  // by halves of words
#if defined(__AVX512BW__)
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        const __m512i halves = _mm512_permutexvar_epi64(
            order, _mm512_shuffle_epi8(reinterpret_cast<__m512i>(word), _mm512_broadcast_i32x4(lane)));
        return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, part)));
#else
        const __m256i halves = _mm256_permute4x64_epi64(
            _mm256_shuffle_epi8(reinterpret_cast<__m256i>(word), _mm256_broadcastsi128_si256(lane)), 0xd8);
        return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, part)));
#endif
    }
};

// Products of the lower halves of two words, plus those of their upper halves.
inline Ints multiply_pairs(Ints a, Ints b) {
#if defined(__AVX512BW__)
    return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#else
    return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#endif
}

// Bytes as pairs of 16 bits: bytes 0 and 2, then 1 and 3. Rows are x + 128, as for the kernels whose factor is
// unsigned.
struct VectorInt8 {
    static constexpr int kHeads = 2, kParts = 2, kRows = kGroup, kXWords = 1, kWrittenGroups = 4;
    using Sum = Ints;
    using Value = int32_t;
    template <int part>
    static Ints factor(Ints word) {
        const auto pairs = reinterpret_cast<Shorts>(word);
        return reinterpret_cast<Ints>(part == 0 ? (pairs << 8) >> 8 : pairs >> 8);
    }
    static Sum add(Sum sum, Value value, Ints factor) { return sum + multiply_pairs(Ints{} + value, factor); }
    static void finish(float* sums, const uint32_t* panel) {
        for (int j = 0; j < kPanel; ++j)
            sums[j] = static_cast<float>(bits<int32_t>(sums[j])) * bits<float>(panel[kPanel + j]);
    }
};

// Writes the values of some words of a row.
inline void values_of_bfloat16(int64_t words, const char* x, char* values) {
    const auto* __restrict from = reinterpret_cast<const uint16_t*>(x);
    auto* __restrict to = reinterpret_cast<float*>(values);
    for (int64_t i = 0; i < words * VectorBfloat16::kParts; ++i) to[i] = from_bf16(from[i]);
}

inline void values_of_int8(int64_t words, const char* x, char* values) {
    const auto* __restrict from = reinterpret_cast<const uint32_t*>(x);
    auto* __restrict to = reinterpret_cast<uint32_t*>(values);
    for (int64_t i = 0; i < words; ++i) {
        const uint32_t word = from[i] ^ 0x80808080u;
        to[2 * i] = word & 0x00ff00ffu;
        to[2 * i + 1] = (word >> 8) & 0x00ff00ffu;
    }
}

struct VectorToFloat32 {
    using Element = float;
    static float load(Element x) { return x; }
    static float rounded(float x) { return x; }
    static Element narrow(float x) { return x; }
};

struct VectorToBfloat16 {
    using Element = uint16_t;
    static float load(Element x) { return from_bf16(x); }
    static float rounded(float x) { return round_bf16(x); }
    static Element narrow(float x) { return static_cast<Element>(bits<uint32_t>(round_bf16(x)) >> 16); }
};

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
