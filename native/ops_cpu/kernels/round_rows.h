// Rows of a GEMM rounded to int8, with a scale for 32 inputs, by AVX2.
#pragma once
#include <cfloat>
#include <limits>

#include "factors.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

struct FromFloat32 {
    static constexpr int64_t kBytes = 4;
    static __m256 at(const char* x) { return _mm256_loadu_ps(reinterpret_cast<const float*>(x)); }
};

struct FromBfloat16 {
    static constexpr int64_t kBytes = 2;
    static __m256 at(const char* x) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
};

// Returns the largest magnitude of 32 inputs, as the bits of a float32; those of infinity and NaN are larger than all.
inline int32_t largest_bits(const __m256* x) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (int v = 0; v < 4; ++v) most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(x[v]), magnitude));
    __m128i of = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    of = _mm_max_epi32(of, _mm_shuffle_epi32(of, 0x4e));
    of = _mm_max_epi32(of, _mm_shuffle_epi32(of, 0xb1));
    return _mm_cvtsi128_si32(of);
}

inline void store(__m256i bytes, int8_t* to) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes); }

inline void store(__m256i bytes, int16_t* to) {
    auto* wide = reinterpret_cast<__m256i*>(to);
    _mm256_storeu_si256(wide, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)));
    _mm256_storeu_si256(wide + 1, _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1)));
}

// Rounds inputs to scale * [-127, 127]. Those that are not finite make the scale NaN. All so small that 127 over them
// is not finite become zeros.
template <class Inputs>
inline Inputs rounded_inputs(const __m256* x, __m128i order) {
    Inputs made{};
    const auto most = bits<float>(largest_bits(x));
    if (!(most <= FLT_MAX)) made.scale = std::numeric_limits<float>::quiet_NaN();
    if (!(most <= FLT_MAX) || most < 1e-36f) return made;
    made.scale = most / 127.0f;
    const __m256 by = _mm256_set1_ps(127.0f / most);
    __m256i whole[4], sum = _mm256_setzero_si256();
    for (int v = 0; v < 4; ++v) {
        whole[v] = _mm256_cvtps_epi32(_mm256_mul_ps(x[v], by));
        sum = _mm256_add_epi32(sum, whole[v]);
    }
    const __m256i packed =  // of each four inputs, those of 0, 8, 16, 24, then of 4, 12, 20, 28
        _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
    const __m256i in_turn = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m256i bytes = _mm256_shuffle_epi8(in_turn, _mm256_broadcastsi128_si256(order));
    store(bytes, made.x);
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    made.sum = static_cast<float>(_mm_cvtsi128_si32(half));
    return made;
}

// Writes the RoundedInputs of some words of a row.
// Vectors: What has the order of 16 inputs.
template <class Vectors, class From>
void round_row(int64_t words, const char* x, char* values) {
    const __m128i order = Vectors::order();
    const int64_t blocks = words * 4 / From::kBytes / kBlockInputs;
    using Inputs = typename Vectors::Inputs;
    for (int64_t b = 0; b < blocks; ++b, x += kBlockInputs * From::kBytes) {
        __m256 of[4];
        for (int v = 0; v < 4; ++v) of[v] = From::at(x + v * kEight * From::kBytes);
        reinterpret_cast<Inputs*>(values)[b] = rounded_inputs<Inputs>(of, order);
    }
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
