// Codes of weights in few bits, and their scales, expanded to factors by AVX2.
#pragma once
#include <immintrin.h>

#include "scales.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

constexpr int kEight = 8;  // outputs of a vector; half a panel has two

// Scales and starts of half a panel: a weight is code * scale + start.
struct Affine {
    __m256 scale[2], start[2];
};

inline __m256i ints_at(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m256 halves_at(const char* p, int64_t i) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * i)));
}

inline __m128i eight_at(const char* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }

// Returns the powers of two whose exponents + 127 lie there in bytes.
inline __m256 powers_at(const char* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(eight_at(p)), 23));
}

// Returns -(a * b).
inline __m256 negative(__m256 a, __m256 b) { return _mm256_sub_ps(_mm256_set1_ps(-0.0f), _mm256_mul_ps(a, b)); }

// Scales of two levels, of `inputs` each; products of theirs are exact.
template <class Layout, int64_t inputs = kBlockInputs>
Affine levels(const char* scales, int64_t input) {
    scales = scales_of<Layout>(scales, input);
    const char* own = scales + 4 * kHalf + input % Layout::kGroup / inputs * 2 * kHalf;
    const auto whole = [](const char* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight_at(p))); };
    Affine by;
    for (int upper = 0; upper < 2; ++upper) {
        by.scale[upper] = _mm256_mul_ps(halves_at(scales, upper * kEight), whole(own + upper * kEight));
        by.start[upper] = negative(halves_at(scales, kHalf + upper * kEight), whole(own + kHalf + upper * kEight));
    }
    return by;
}

// The same without starts, with signed scales of the 16 inputs from `input` on.
template <class Layout>
Affine signed_levels(const char* scales, int64_t input) {
    scales = scales_of<Layout>(scales, input);
    const char* own = scales + 2 * kHalf + input % Layout::kGroup / kHalf * kHalf;
    Affine by;
    for (int upper = 0; upper < 2; ++upper) {
        const __m256i whole = _mm256_cvtepi8_epi32(eight_at(own + upper * kEight));
        by.scale[upper] = _mm256_mul_ps(halves_at(scales, upper * kEight), _mm256_cvtepi32_ps(whole));
        by.start[upper] = _mm256_setzero_ps();
    }
    return by;
}

// Returns float16 scales of half a panel, without starts.
inline Affine half_scales_at(const char* p) {
    return {{halves_at(p, 0), halves_at(p, kEight)}, {_mm256_setzero_ps(), _mm256_setzero_ps()}};
}

// Returns float32 scales of half a panel, without starts.
inline Affine float_scales_at(const char* p) {
    const auto* const from = reinterpret_cast<const float*>(p);
    return {{_mm256_loadu_ps(from), _mm256_loadu_ps(from + kEight)}, {_mm256_setzero_ps(), _mm256_setzero_ps()}};
}

// Stores factors, rounded to bfloat16 or as they are.
template <bool round>
inline void put(float* to, __m256 x) {
    if constexpr (round) {
        const __m256i u = _mm256_castps_si256(x),
                      odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        const __m256i more = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
        x = _mm256_castsi256_ps(_mm256_and_si256(more, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    _mm256_storeu_ps(to, x);
}

// Tables in whole numbers: FP4 twice, the others as they are.
inline constexpr int8_t kTwiceFp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
inline constexpr int8_t kWholeQ3[16] = {-4, -3, -2, -1, 0, 1, 2, 3};
inline constexpr int8_t kWholeIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// The numbers that 4 bits of each lane stand for, whatever is above them: 0 to 15, or those of a table.
struct WholeNumbers {
    static __m256 of(__m256i codes) { return _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15))); }
};
template <const float (&table)[16]>
struct TableNumbers {
    static __m256 of(__m256i codes) {  // permutations take three bits
        const __m256 lower = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), codes);
        const __m256 upper = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), codes);
        return _mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
    }
};
struct Fp4Numbers {
    static __m256 of(__m256i codes) {
        const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN));
        return _mm256_xor_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(kFp4), codes), _mm256_castsi256_ps(sign));
    }
};

// Codes of 4 bits. first, second: Of 16 inputs each.
template <bool round, int64_t stride, class Numbers = WholeNumbers>
void put_nibbles(const Affine& first, const Affine& second, const char* codes, float* to) {
    for (int part = 0; part < 4; ++part) {  // 16 inputs by 8 outputs
        const int words = part / 2, upper = part % 2;
        const Affine& by = words == 0 ? first : second;
        const __m256 a = _mm256_castsi256_ps(ints_at(codes + part * 64));
        const __m256 b = _mm256_castsi256_ps(ints_at(codes + part * 64 + 32));
        const __m256i own[] = {
            _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), 0xd8),
            _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8),
        };
        for (int input = 0; input < 2; ++input)
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) {
                const __m256 number = Numbers::of(_mm256_srli_epi32(own[input], 4 * k));
                put<round>(to + (words * 16 + 2 * k + input) * stride + upper * kEight,
                           _mm256_fmadd_ps(by.scale[upper], number, by.start[upper]));
            }
    }
}

// Codes of a byte, signed. first, second: Of 16 inputs each.
template <bool round, int64_t stride>
void put_bytes(const Affine& first, const Affine& second, const char* codes, float* to) {
    for (int word = 0; word < kBlockInputs / 2; ++word) {
        const Affine& by = word < kBlockInputs / 4 ? first : second;
        const __m256i of = ints_at(codes + word * 32);
#pragma GCC unroll 4
        for (int byte = 0; byte < 4; ++byte) {
            const int own = byte / 2, upper = byte % 2;
            const __m256i code = _mm256_srai_epi32(_mm256_slli_epi32(of, 24 - 8 * byte), 24);
            put<round>(to + (word * 2 + own) * stride + upper * kEight,
                       _mm256_fmadd_ps(by.scale[upper], _mm256_cvtepi32_ps(code), by.start[upper]));
        }
    }
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
