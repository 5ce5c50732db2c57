// The factors of each form of weights in few bits. The numbers are those that weight_form.h describes.
#pragma once
#include "factors.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

struct NibbleVectors;  // code_vectors.h
struct Fp4Vectors;
struct ByteVectors;
struct TwoScaleVectors;
template <const int8_t (&table)[16], int scales, int at_once>
struct TableVectors;

// Writes codes of 4 bits. Own: The form, whose `affine` gives scales of `inputs`, 32 or 16.
template <class Own, int64_t inputs = kBlockInputs, class Numbers = WholeNumbers>
struct Nibbles {
    template <bool round, int64_t stride>
    static void write(const char* scales, int64_t input, const char* codes, float* to) {
        const Affine first = Own::affine(scales, input);
        if constexpr (inputs < kBlockInputs)
            put_nibbles<round, stride, Numbers>(first, Own::affine(scales, input + inputs), codes, to);
        else
            put_nibbles<round, stride, Numbers>(first, first, codes, to);
    }
};

// Writes codes of a byte, as above.
template <class Own, int64_t inputs = kBlockInputs>
struct Bytes {
    template <bool round, int64_t stride>
    static void write(const char* scales, int64_t input, const char* codes, float* to) {
        const Affine first = Own::affine(scales, input);
        if constexpr (inputs < kBlockInputs)
            put_bytes<round, stride>(first, Own::affine(scales, input + inputs), codes, to);
        else
            put_bytes<round, stride>(first, first, codes, to);
    }
};

// Forms as tiles take them. `Vectors`, if not void, is how vectors hold codes as bytes, `Words` how AVX-512 expands
// them (words_avx512.h). `write` expands the 32 inputs from `input` on of half a panel.
struct Int4Factors : Int4Layout, Nibbles<Int4Factors> {
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
};

struct Q41Factors : Q41Layout, Nibbles<Q41Factors> {
    using Vectors = NibbleVectors;
    using Words = struct Q41Words;

    static Affine affine(const char* scales, int64_t input) {
        scales = scales_of<Q41Layout>(scales, input);
        return {{halves_at(scales, 0), halves_at(scales, kEight)},
                {halves_at(scales, kHalf), halves_at(scales, kHalf + kEight)}};
    }
};

struct Q51Factors : Q51Layout, Bytes<Q51Factors> {
    using Vectors = ByteVectors;
    using Words = struct Q51Words;

    static Affine affine(const char* scales, int64_t input) {
        scales = scales_of<Q51Layout>(scales, input);
        return {{halves_at(scales, 0), halves_at(scales, kEight)},
                {halves_at(scales, kHalf), halves_at(scales, kHalf + kEight)}};
    }
};

struct Q80Factors : Q80Layout, Bytes<Q80Factors> {
    using Vectors = ByteVectors;
    using Words = struct Q80Words;

    static Affine affine(const char* scales, int64_t input) {
        return half_scales_at(scales_of<Q80Layout>(scales, input));
    }
};

struct Q4KFactors : Q4KLayout, Nibbles<Q4KFactors> {
    using Vectors = NibbleVectors;
    using Words = struct Q4KWords;

    static Affine affine(const char* scales, int64_t input) { return levels<Q4KLayout>(scales, input); }
};

struct Q5KFactors : Q5KLayout, Bytes<Q5KFactors> {
    using Vectors = ByteVectors;
    using Words = struct Q5KWords;

    static Affine affine(const char* scales, int64_t input) { return levels<Q5KLayout>(scales, input); }
};

struct Q6KFactors : Q6KLayout, Bytes<Q6KFactors, kHalf> {
    using Vectors = TwoScaleVectors;
    using Words = struct Q6KWords;

    static Affine affine(const char* scales, int64_t input) { return signed_levels<Q6KLayout>(scales, input); }
};

struct Q2KFactors : Q2KLayout, Nibbles<Q2KFactors, kHalf> {
    using Vectors = void;
    using Words = struct Q2KWords;

    static Affine affine(const char* scales, int64_t input) { return levels<Q2KLayout, kHalf>(scales, input); }
};

// Numbers of a table, with signed scales of 16 inputs.
template <class Layout, const float (&table)[16]>
struct SignedLevelFactors : Layout, Nibbles<SignedLevelFactors<Layout, table>, kHalf, TableNumbers<table>> {
    static Affine affine(const char* scales, int64_t input) { return signed_levels<Layout>(scales, input); }
};
struct Q3KFactors : SignedLevelFactors<Q3KLayout, kQ3> {
    using Vectors = TableVectors<kWholeQ3, 2, 2>;
    using Words = struct Q3KWords;
};
struct Iq4XsFactors : SignedLevelFactors<Iq4XsLayout, kIq4> {
    using Vectors = TableVectors<kWholeIq4, 2, 1>;
    using Words = struct Iq4XsWords;
};

struct Iq4NlFactors : Iq4NlLayout, Nibbles<Iq4NlFactors, kBlockInputs, TableNumbers<kIq4>> {
    using Vectors = TableVectors<kWholeIq4, 1, 1>;
    using Words = struct Iq4NlWords;

    static Affine affine(const char* scales, int64_t input) {
        return half_scales_at(scales_of<Iq4NlLayout>(scales, input));
    }
};

struct Nf4Factors : Nf4Layout, Nibbles<Nf4Factors, kBlockInputs, TableNumbers<kNf4>> {
    using Vectors = void;
    using Words = struct Nf4Words;

    static Affine affine(const char* scales, int64_t input) {
        return float_scales_at(scales_of<Nf4Layout>(scales, input));
    }
};

struct Nvfp4Factors : Nvfp4Layout {
    using Vectors = TableVectors<kTwiceFp4, 2, 2>;
    using Words = struct Nvfp4Words;

    // Of codes as `TableVectors` shows them, twice their numbers.
    static Affine affine(const char* scales, int64_t input) {
        Affine by = levels_at(scales, input);
        for (__m256& scale : by.scale) scale = _mm256_mul_ps(scale, _mm256_set1_ps(0.5f));
        return by;
    }
    // Of the 16 inputs from `input` on. As a float16 FP8 is 2^-8 of the number.
    static Affine levels_at(const char* scales, int64_t input) {
        scales = scales_of<Nvfp4Layout>(scales, input);
        const char* own = scales + 4 * kHalf + input % kGroup / kHalf * kHalf;
        Affine by = float_scales_at(scales);
        for (int upper = 0; upper < 2; ++upper) {
            const __m128i fp8 = _mm_cvtepu8_epi16(eight_at(own + upper * kEight));
            const __m128i size = _mm_and_si128(_mm_slli_epi16(fp8, 7), _mm_set1_epi16(0x3f80));
            const __m128i sign = _mm_and_si128(_mm_slli_epi16(fp8, 8), _mm_set1_epi16(static_cast<int16_t>(0x8000)));
            by.scale[upper] = _mm256_mul_ps(by.scale[upper], _mm256_cvtph_ps(_mm_or_si128(size, sign)));
        }
        return by;
    }
    template <bool round, int64_t stride>
    static void write(const char* scales, int64_t input, const char* codes, float* to) {
        put_nibbles<round, stride, Fp4Numbers>(levels_at(scales, input), levels_at(scales, input + kHalf), codes, to);
    }
};

struct I8Factors : I8Layout, Bytes<I8Factors> {
    using Vectors = ByteVectors;
    using Words = struct I8Words;

    static Affine affine(const char* scales, int64_t input) {
        return float_scales_at(scales_of<I8Layout>(scales, input));
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

// Writes FP8 numbers. Own: The form, whose `affine` gives scales.
template <class Own>
struct Fp8Bytes {
    template <bool round, int64_t stride>
    static void write(const char* scales, int64_t input, const char* codes, float* to) {
        const Affine by = Own::affine(scales, input);
        const __m256 exponent = _mm256_set1_ps(0x1p120f);
        const __m256i digits = _mm256_set1_epi32(0x07f00000), sign = _mm256_set1_epi32(static_cast<int>(0x80000000u));
        for (int word = 0; word < kBlockInputs / 2; ++word) {
            const __m256i of = ints_at(codes + word * 32);
#pragma GCC unroll 4
            for (int byte = 0; byte < 4; ++byte) {
                const int own = byte / 2, upper = byte % 2;
                const __m256i top = _mm256_slli_epi32(of, 24 - 8 * byte);
                const __m256 size = _mm256_castsi256_ps(_mm256_and_si256(_mm256_srli_epi32(top, 4), digits));
                const __m256 magnitude = _mm256_mul_ps(_mm256_mul_ps(size, exponent), by.scale[upper]);
                put<round>(to + (word * 2 + own) * stride + upper * kEight,
                           _mm256_xor_ps(magnitude, _mm256_castsi256_ps(_mm256_and_si256(top, sign))));
            }
        }
    }
};

struct Fp8Factors : Fp8Layout, Fp8Bytes<Fp8Factors> {
    using Vectors = void;
    using Words = struct Fp8Words;

    static Affine affine(const char* scales, int64_t input) {
        return float_scales_at(scales_of<Fp8Layout>(scales, input));
    }
};

struct Mxfp8Factors : Mxfp8Layout, Fp8Bytes<Mxfp8Factors> {
    using Vectors = void;
    using Words = struct Mxfp8Words;

    static Affine affine(const char* scales, int64_t input) {
        scales = scales_of<Mxfp8Layout>(scales, input);
        return {{powers_at(scales), powers_at(scales + kEight)}, {_mm256_setzero_ps(), _mm256_setzero_ps()}};
    }
};

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
