// 8 floats per vector.
#pragma once
#include <immintrin.h>

#include "target.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

constexpr int W = 8;
constexpr int kMaxRows = 4;
constexpr int kAccs = 8;
constexpr int kWideTurn = 1;
using F = __m256;

inline F vload(const float* p) { return _mm256_loadu_ps(p); }
inline void vstore(float* p, F a) { _mm256_storeu_ps(p, a); }
inline F vset(float x) { return _mm256_set1_ps(x); }
inline F vzero() { return _mm256_setzero_ps(); }
inline F vfma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F vmul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F vadd(F a, F b) { return _mm256_add_ps(a, b); }
inline F vsub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F vdiv(F a, F b) { return _mm256_div_ps(a, b); }
inline F vmax(F a, F b) { return _mm256_max_ps(a, b); }
inline bool any_greater(F a, float b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, vset(b), _CMP_GT_OQ)) != 0; }

inline float hmax(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline float hsum(F a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}

inline F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline F load_bf16(const uint16_t* p) {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}

inline void load_i8_pairs(const uint8_t* p, int pair, F& even, F& odd) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 24 - 16 * pair), 24));
    odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 16 - 16 * pair), 24));
}

inline void load_i4_pairs(const uint8_t* p, int bit, F& low, F& high) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i eight = _mm256_set1_epi32(8);
    low =
        _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(_mm256_srli_epi32(x, bit), _mm256_set1_epi32(15)), eight));
    high = _mm256_cvtepi32_ps(
        _mm256_sub_epi32(_mm256_and_si256(_mm256_srli_epi32(x, bit + 8), _mm256_set1_epi32(15)), eight));
}

// Codes 0..63 stand for -32..31: their low bits begin at `bit` and bit + 8, their high bits at `at` and at + 8.
inline void load_i6_pairs(const uint8_t* p, int bit, const uint8_t* high_bits, int at, F& low, F& high) {
    const __m256i x = _mm256_srli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), bit);
    const __m256i y = _mm256_srli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high_bits)), at);
    const auto code = [&](int byte) {
        const __m256i four = _mm256_and_si256(_mm256_srli_epi32(x, byte), _mm256_set1_epi32(15));
        const __m256i two = _mm256_and_si256(_mm256_srli_epi32(y, byte), _mm256_set1_epi32(3));
        const __m256i all = _mm256_or_si256(four, _mm256_slli_epi32(two, 4));
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(all, _mm256_set1_epi32(32)));
    };
    low = code(0);
    high = code(8);
}

inline F keep_lanes(F a, int lo, int hi) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i keep = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane),
                                             _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
    return _mm256_blendv_ps(vset(-__builtin_inff()), a, _mm256_castsi256_ps(keep));
}

inline F fraction(F t) { return _mm256_sub_ps(t, _mm256_floor_ps(t)); }  // NaN of -inf

// p * 2^floor(t); zero where t < -126, whatever p is.
inline F times_exp2(F p, F t) {
    const __m256i whole = _mm256_cvtps_epi32(_mm256_floor_ps(t));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23);
    const F keep = _mm256_cmp_ps(t, vset(-126.0f), _CMP_NLT_UQ);
    return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(power)), keep);
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
