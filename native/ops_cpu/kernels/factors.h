// The factors of weights in few bits, expanded by AVX2. The numbers are those that weight_form.h describes.
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

// Scales of two levels; products of theirs are exact.
template <class Layout>
Affine levels(const char* scales, int64_t input) {
    scales = scales_of<Layout>(scales, input);
    const char* own = scales + 4 * kHalf + input % Layout::kGroup / kBlockInputs * 2 * kHalf;
    const auto whole = [](const char* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight_at(p))); };
    Affine by;
    for (int upper = 0; upper < 2; ++upper) {
        by.scale[upper] = _mm256_mul_ps(halves_at(scales, upper * kEight), whole(own + upper * kEight));
        by.start[upper] = negative(halves_at(scales, kHalf + upper * kEight), whole(own + kHalf + upper * kEight));
    }
    return by;
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

// Codes of 4 bits from 0 to 15.
template <bool round, int64_t stride>
void put_nibbles(const Affine& by, const char* codes, float* to) {
    for (int part = 0; part < 4; ++part) {  // 16 inputs by 8 outputs
        const int words = part / 2, upper = part % 2;
        const __m256 a = _mm256_castsi256_ps(ints_at(codes + part * 64));
        const __m256 b = _mm256_castsi256_ps(ints_at(codes + part * 64 + 32));
        const __m256i own[] = {
            _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), 0xd8),
            _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8),
        };
        for (int input = 0; input < 2; ++input)
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) {
                const __m256i code = _mm256_and_si256(_mm256_srli_epi32(own[input], 4 * k), _mm256_set1_epi32(15));
                put<round>(to + (words * 16 + 2 * k + input) * stride + upper * kEight,
                           _mm256_fmadd_ps(by.scale[upper], _mm256_cvtepi32_ps(code), by.start[upper]));
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

struct NibbleVectors;  // code_vectors.h
struct Fp4Vectors;
struct ByteVectors;
struct TwoScaleVectors;

// Forms as tiles take them. `Vectors`, if not void, is how vectors hold codes as bytes, `Words` how AVX-512 expands
// them (words_avx512.h). `write` expands the 32 inputs from `input` on of half a panel.
struct Int4Factors : Int4Layout {
    using Vectors = NibbleVectors;
    using Words = struct Int4Words;

    static Affine affine(const char* scales, int64_t input) {
        scales = scales_of<Int4Layout>(scales, input);
        Affine by;
        for (int upper = 0; upper < 2; ++upper) {
            by.scale[upper] = halves_at(scales, upper * kEight);
            by.start[upper] = negative(by.scale[upper], halves_at(scales, kHalf + upper * kEight));
        }
        return by;
    }
    template <bool round, int64_t stride>
    static void write(const char* scales, int64_t input, const char* codes, float* to) {
        put_nibbles<round, stride>(affine(scales, input), codes, to);
    }
};

struct Q41Factors : Q41Layout {
    using Vectors = NibbleVectors;
    using Words = struct Q41Words;

    static Affine affine(const char* scales, int64_t input) {
        scales = scales_of<Q41Layout>(scales, input);
        return {{halves_at(scales, 0), halves_at(scales, kEight)},
                {halves_at(scales, kHalf), halves_at(scales, kHalf + kEight)}};
    }
    template <bool round, int64_t stride>
    static void write(const char* scales, int64_t input, const char* codes, float* to) {
        put_nibbles<round, stride>(affine(scales, input), codes, to);
    }
};

struct Q80Factors : Q80Layout {
    using Vectors = ByteVectors;
    using Words = struct Q80Words;

    static Affine affine(const char* scales, int64_t input) {
        scales = scales_of<Q80Layout>(scales, input);
        return {{halves_at(scales, 0), halves_at(scales, kEight)}, {_mm256_setzero_ps(), _mm256_setzero_ps()}};
    }
    template <bool round, int64_t stride>
    static void write(const char* scales, int64_t input, const char* codes, float* to) {
        const Affine by = affine(scales, input);
        put_bytes<round, stride>(by, by, codes, to);
    }
};

struct Q4KFactors : Q4KLayout {
    using Vectors = NibbleVectors;
    using Words = struct Q4KWords;

    static Affine affine(const char* scales, int64_t input) { return levels<Q4KLayout>(scales, input); }
    template <bool round, int64_t stride>
    static void write(const char* scales, int64_t input, const char* codes, float* to) {
        put_nibbles<round, stride>(affine(scales, input), codes, to);
    }
};

struct Q5KFactors : Q5KLayout {
    using Vectors = ByteVectors;
    using Words = struct Q5KWords;

    static Affine affine(const char* scales, int64_t input) { return levels<Q5KLayout>(scales, input); }
    template <bool round, int64_t stride>
    static void write(const char* scales, int64_t input, const char* codes, float* to) {
        const Affine by = affine(scales, input);
        put_bytes<round, stride>(by, by, codes, to);
    }
};

struct Q6KFactors : Q6KLayout {
    using Vectors = TwoScaleVectors;
    using Words = struct Q6KWords;

    // Of the 16 inputs from `input` on.
    static Affine affine(const char* scales, int64_t input) {
        scales = scales_of<Q6KLayout>(scales, input);
        const char* own = scales + 2 * kHalf + input % kGroup / kHalf * kHalf;
        Affine by;
        for (int upper = 0; upper < 2; ++upper) {
            const __m256i whole = _mm256_cvtepi8_epi32(eight_at(own + upper * kEight));
            by.scale[upper] = _mm256_mul_ps(halves_at(scales, upper * kEight), _mm256_cvtepi32_ps(whole));
            by.start[upper] = _mm256_setzero_ps();
        }
        return by;
    }
    template <bool round, int64_t stride>
    static void write(const char* scales, int64_t input, const char* codes, float* to) {
        put_bytes<round, stride>(affine(scales, input), affine(scales, input + kHalf), codes, to);
    }
};

struct Mxfp4Factors : Mxfp4Layout {
    using Vectors = Fp4Vectors;
    using Words = struct Mxfp4Words;

    // Of codes as `Fp4Vectors` shows them.
    static Affine affine(const char* scales, int64_t input) {
        scales = scales_of<Mxfp4Layout>(scales, input);
        Affine by;
        for (int upper = 0; upper < 2; ++upper) {
            const __m256 scale = powers_at(scales + upper * kEight);
            by.scale[upper] = _mm256_mul_ps(scale, _mm256_set1_ps(0.5f));
            by.start[upper] = _mm256_mul_ps(scale, _mm256_set1_ps(-6.0f));
        }
        return by;
    }
    template <bool, int64_t stride>
    static void write(const char* scales, int64_t input, const char* codes, float* to) {  // bfloat16 holds them exactly
        scales = scales_of<Mxfp4Layout>(scales, input);
        const __m256 magnitudes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
        const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000u));
        for (int upper = 0; upper < 2; ++upper) {
            const __m256 scale = powers_at(scales + upper * kEight);
            for (int words = 0; words < 4; ++words) {
                const __m256i of = ints_at(codes + words * 64 + upper * 32);
#pragma GCC unroll 8
                for (int k = 0; k < 8; ++k) {  // the first input of every word, then the second
                    const __m256 magnitude = _mm256_permutevar8x32_ps(magnitudes, _mm256_srli_epi32(of, 4 * k));
                    const __m256i own = _mm256_and_si256(_mm256_slli_epi32(of, 28 - 4 * k), sign);
                    put<false>(to + (words * 8 + k % 4 * 2 + k / 4) * stride + upper * kEight,
                               _mm256_xor_ps(_mm256_mul_ps(magnitude, scale), _mm256_castsi256_ps(own)));
                }
            }
        }
    }
};

struct Fp8Factors : Fp8Layout {
    using Vectors = void;
    using Words = struct Fp8Words;

    template <bool round, int64_t stride>
    static void write(const char* scales, int64_t input, const char* codes, float* to) {
        scales = scales_of<Fp8Layout>(scales, input);
        const __m256 exponent = _mm256_set1_ps(0x1p120f);
        const __m256 scale[] = {_mm256_loadu_ps(reinterpret_cast<const float*>(scales)),
                                _mm256_loadu_ps(reinterpret_cast<const float*>(scales) + kEight)};
        const __m256i digits = _mm256_set1_epi32(0x07f00000), sign = _mm256_set1_epi32(static_cast<int>(0x80000000u));
        for (int word = 0; word < kBlockInputs / 2; ++word) {
            const __m256i of = ints_at(codes + word * 32);
#pragma GCC unroll 4
            for (int byte = 0; byte < 4; ++byte) {
                const int own = byte / 2, upper = byte % 2;
                const __m256i top = _mm256_slli_epi32(of, 24 - 8 * byte);
                const __m256 size = _mm256_castsi256_ps(_mm256_and_si256(_mm256_srli_epi32(top, 4), digits));
                const __m256 magnitude = _mm256_mul_ps(_mm256_mul_ps(size, exponent), scale[upper]);
                put<round>(to + (word * 2 + own) * stride + upper * kEight,
                           _mm256_xor_ps(magnitude, _mm256_castsi256_ps(_mm256_and_si256(top, sign))));
            }
        }
    }
};

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
