// 16 floats per vector.
#pragma once
#include <immintrin.h>

#include "target.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

constexpr int W = 16;
constexpr int kMaxRows = 8;   // query rows that share one pass over K or V
constexpr int kAccs = 24;     // accumulator registers of one pass
constexpr int kWideTurn = 2;  // units of whole elements that lie side by side
using F = __m512;

inline F vload(const float* p) { return _mm512_loadu_ps(p); }
inline void vstore(float* p, F a) { _mm512_storeu_ps(p, a); }
inline F vset(float x) { return _mm512_set1_ps(x); }
inline F vzero() { return _mm512_setzero_ps(); }
inline F vfma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F vmul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F vadd(F a, F b) { return _mm512_add_ps(a, b); }
inline F vsub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F vdiv(F a, F b) { return _mm512_div_ps(a, b); }
inline F vmax(F a, F b) { return _mm512_max_ps(a, b); }
inline bool any_greater(F a, float b) { return _mm512_cmp_ps_mask(a, vset(b), _CMP_GT_OQ) != 0; }
inline float hmax(F a) { return _mm512_reduce_max_ps(a); }
inline float hsum(F a) { return _mm512_reduce_add_ps(a); }

inline F load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
    const __m512i x = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline F load_bf16(const uint16_t* p) {
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}

inline void load_i8_pairs(const uint8_t* p, int pair, F& even, F& odd) {
    const __m512i x = _mm512_loadu_si512(p);
    even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 24 - 16 * pair), 24));
    odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 16 - 16 * pair), 24));
}

// Codes 0..15 stand for -8..7.
inline void load_i4_pairs(const uint8_t* p, int bit, F& low, F& high) {
    const F values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i x = _mm512_loadu_si512(p);
    low = _mm512_permutexvar_ps(_mm512_srli_epi32(x, bit), values);  // looks at four bits only
    high = _mm512_permutexvar_ps(_mm512_srli_epi32(x, bit + 8), values);
}

// Codes 0..63 stand for -32..31: their low bits begin at `bit` and bit + 8, their high bits at `at` and at + 8.
inline void load_i6_pairs(const uint8_t* p, int bit, const uint8_t* high_bits, int at, F& low, F& high) {
    const __m512i x = _mm512_srli_epi32(_mm512_loadu_si512(p), bit);
    const __m512i y = _mm512_slli_epi32(_mm512_srli_epi32(_mm512_loadu_si512(high_bits), at), 4);
    const auto code = [](__m512i four, __m512i two) {
        const __m512i all = _mm512_or_si512(_mm512_and_si512(four, _mm512_set1_epi32(15)),
                                            _mm512_and_si512(two, _mm512_set1_epi32(48)));
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(all, _mm512_set1_epi32(32)));
    };
    low = code(x, y);
    high = code(_mm512_srli_epi32(x, 8), _mm512_srli_epi32(y, 8));
}

// Lanes outside [lo, hi) become -inf.
inline F keep_lanes(F a, int lo, int hi) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 keep =
        _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(lo)) & _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(hi));
    return _mm512_mask_mov_ps(vset(-__builtin_inff()), keep, a);
}

inline F fraction(F t) { return _mm512_reduce_ps(t, 9); }         // t - floor(t); zero of -inf
inline F times_exp2(F p, F t) { return _mm512_scalef_ps(p, t); }  // p * 2^floor(t)

#define HPCDECODE_VECTOR_STORE_BF16
// Round to nearest even; a NaN stays one.
inline void store_bf16(uint16_t* p, F a) {
    const __m512i x = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i y = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(y));
}

#ifdef __AVX512BF16__
#define HPCDECODE_VECTOR_KEEP_BF16
// Rounds as store_bf16 does, but denormals to zero; returns what loading will give.
inline F keep_bf16(uint16_t* p, F a) {
    const __m256i x = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
#endif

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
