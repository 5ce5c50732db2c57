// Codes of weights in few bits, expanded to words of 16 outputs, bfloat16, in registers.
#pragma once
#include "scales.h"
#include "units_avx512.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

inline __m512 rounded_pairs(__m512 one, __m512 other) {
    return reinterpret_cast<__m512>(_mm512_cvtne2ps_pbh(other, one));
}

// 8 outputs' numbers of 16, each for both inputs of a word.
template <int first>
inline __m512 doubled(__m512 x) {
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(first)), x);
}

// Of 16 outputs, each for both inputs of a word: a weight is code * by + start.
struct Affine512 {
    __m512 by[2], start[2];
};

inline Affine512 affine512(__m512 by, __m512 start) {
    return {{doubled<0>(by), doubled<8>(by)}, {doubled<0>(start), doubled<8>(start)}};
}

inline __m512 halves16(const char* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline __m512 bytes16(const char* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// A form's codes in registers give word after word of 16 outputs. table: The numbers that codes stand for.
// kPairedRows: Rows, at most, that are multiplied by two panels at once: with fewer sums each waits for the one before.
// kDirectRows: Rows, at most, for which words are not written first. Above 12 a tile takes a half after the other.
inline constexpr float kWhole[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
template <class Form, const float (&table)[16] = kWhole>
struct NibbleWords : Form {
    static constexpr int kWords = 8, kPairedRows = 2, kDirectRows = 12;
    static constexpr int64_t kScaleInputs = kBlockInputs;
    using Scales = Affine512;
    struct Codes {
        Words of[2];
    };
    static Codes codes(const char* p) {
        const auto* words = reinterpret_cast<const uint32_t*>(p);
        return {{load_words(words), load_words(words + kLanes)}};
    }
    static Words next(Codes& codes, const Scales& scales) {
        const __m512 numbers = _mm512_loadu_ps(table);
        __m512 half[2];
        for (int b = 0; b < 2; ++b) {
            half[b] = _mm512_fmadd_ps(scales.by[b], _mm512_permutexvar_ps(codes.of[b], numbers), scales.start[b]);
            codes.of[b] = _mm512_srli_epi32(codes.of[b], 4);
        }
        return reinterpret_cast<Words>(rounded_pairs(half[0], half[1]));
    }
};

struct Int4Words : NibbleWords<Int4Layout> {
    static Scales scales(const char* all, int64_t input) {
        const char* p = scales_of<Int4Layout>(all, input);
        const __m512 by = halves16(p), zero = halves16(p + 2 * kHalf);
        return affine512(by, _mm512_fnmadd_ps(by, zero, _mm512_setzero_ps()));
    }
};

struct Q41Words : NibbleWords<Q41Layout> {
    static Scales scales(const char* all, int64_t input) {
        const char* p = scales_of<Q41Layout>(all, input);
        return affine512(halves16(p), halves16(p + 2 * kHalf));
    }
};

// Scales of two levels, of `inputs` each.
template <class Form, int64_t inputs = kBlockInputs>
inline Affine512 levels512(const char* all, int64_t input) {
    const char* p = scales_of<Form>(all, input);
    const char* own = p + 4 * kHalf + input % Form::kGroup / inputs * 2 * kHalf;
    const __m512 taken = _mm512_fnmadd_ps(halves16(p + 2 * kHalf), bytes16(own + kHalf), _mm512_setzero_ps());
    return affine512(_mm512_mul_ps(halves16(p), bytes16(own)), taken);
}

// The same without starts, with signed scales of the 16 inputs from `input` on.
template <class Form>
inline __m512 signed_levels512(const char* all, int64_t input) {
    const char* p = scales_of<Form>(all, input);
    const char* own = p + 2 * kHalf + input % Form::kGroup / kHalf * kHalf;
    const Words whole = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(own)));
    return _mm512_mul_ps(halves16(p), _mm512_cvtepi32_ps(whole));
}

struct Q2KWords : NibbleWords<Q2KLayout> {
    static constexpr int64_t kScaleInputs = kHalf;
    static Scales scales(const char* all, int64_t input) { return levels512<Q2KLayout, kHalf>(all, input); }
};

// Numbers of a table, with signed scales of 16 inputs.
template <class Layout, const float (&table)[16]>
struct SignedLevelWords : NibbleWords<Layout, table> {
    static constexpr int64_t kScaleInputs = kHalf;
    static Affine512 scales(const char* all, int64_t input) {
        return affine512(signed_levels512<Layout>(all, input), _mm512_setzero_ps());
    }
};
struct Q3KWords : SignedLevelWords<Q3KLayout, kQ3> {};
struct Iq4XsWords : SignedLevelWords<Iq4XsLayout, kIq4> {};

struct Iq4NlWords : NibbleWords<Iq4NlLayout, kIq4> {
    static Scales scales(const char* all, int64_t input) {
        return affine512(halves16(scales_of<Iq4NlLayout>(all, input)), _mm512_setzero_ps());
    }
};

struct Q4KWords : NibbleWords<Q4KLayout> {
    static Scales scales(const char* all, int64_t input) { return levels512<Q4KLayout>(all, input); }
};

struct Nf4Words : NibbleWords<Nf4Layout, kNf4> {
    static Scales scales(const char* all, int64_t input) {
        return affine512(_mm512_loadu_ps(scales_of<Nf4Layout>(all, input)), _mm512_setzero_ps());
    }
};

struct Nvfp4Words : NibbleWords<Nvfp4Layout, kFp4> {
    static constexpr int64_t kScaleInputs = kHalf;
    static Scales scales(const char* all, int64_t input) {  // as a float16 FP8 is 2^-8 of the number
        const char* p = scales_of<Nvfp4Layout>(all, input);
        const char* own = p + 4 * kHalf + input % kGroup / kHalf * kHalf;
        const __m256i fp8 = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(own)));
        const __m256i size = _mm256_and_si256(_mm256_slli_epi16(fp8, 7), _mm256_set1_epi16(0x3f80));
        const __m256i sign =
            _mm256_and_si256(_mm256_slli_epi16(fp8, 8), _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
        const __m512 by = _mm512_cvtph_ps(_mm256_or_si256(size, sign));
        return affine512(_mm512_mul_ps(_mm512_loadu_ps(p), by), _mm512_setzero_ps());
    }
};

// int8 codes of a word of 16 outputs: pairs of 16 bits, whose lower ones are of the first 8 outputs.
struct ByteCodes {
    const char* at;
    void next(__m512& one, __m512& other) {
        const Words wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
        one = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(wide, 16), 16));
        other = _mm512_cvtepi32_ps(_mm512_srai_epi32(wide, 16));
        at += 2 * kHalf;
    }
};

template <class Form>
struct ByteWords : Form {
    static constexpr int kWords = 8, kPairedRows = 0, kDirectRows = 12;
    static constexpr int64_t kScaleInputs = kBlockInputs;
    struct Scales {
        __m512 by[2];
    };
    using Codes = ByteCodes;
    static Codes codes(const char* p) { return {p}; }
    static Words next(Codes& codes, const Scales& scales) {
        __m512 one, other;
        codes.next(one, other);
        return reinterpret_cast<Words>(
            rounded_pairs(_mm512_mul_ps(one, scales.by[0]), _mm512_mul_ps(other, scales.by[1])));
    }
};

struct Q80Words : ByteWords<Q80Layout> {
    static Scales scales(const char* all, int64_t input) {
        const __m512 by = halves16(scales_of<Q80Layout>(all, input));
        return {{doubled<0>(by), doubled<8>(by)}};
    }
};

struct I8Words : ByteWords<I8Layout> {
    static Scales scales(const char* all, int64_t input) {
        const __m512 by = _mm512_loadu_ps(scales_of<I8Layout>(all, input));
        return {{doubled<0>(by), doubled<8>(by)}};
    }
};

struct Q6KWords : ByteWords<Q6KLayout> {
    static constexpr int64_t kScaleInputs = kHalf;
    static Scales scales(const char* all, int64_t input) {
        const __m512 by = signed_levels512<Q6KLayout>(all, input);
        return {{doubled<0>(by), doubled<8>(by)}};
    }
};

// The same with starts.
template <class Form>
struct AffineByteWords : ByteWords<Form> {
    using Scales = Affine512;
    static Words next(ByteCodes& codes, const Scales& scales) {
        __m512 one, other;
        codes.next(one, other);
        return reinterpret_cast<Words>(rounded_pairs(_mm512_fmadd_ps(one, scales.by[0], scales.start[0]),
                                                     _mm512_fmadd_ps(other, scales.by[1], scales.start[1])));
    }
};

struct Q5KWords : AffineByteWords<Q5KLayout> {
    static Scales scales(const char* all, int64_t input) { return levels512<Q5KLayout>(all, input); }
};

struct Q51Words : AffineByteWords<Q51Layout> {
    static Scales scales(const char* all, int64_t input) {
        const char* p = scales_of<Q51Layout>(all, input);
        return affine512(halves16(p), halves16(p + 2 * kHalf));
    }
};

// A number's exponent grows by that of the scale, unless it is zero.
struct Mxfp4Words : Mxfp4Layout {
    static constexpr int kWords = 4, kPairedRows = 5, kDirectRows = 20;
    static constexpr int64_t kScaleInputs = kBlockInputs;
    using Scales = Words;
    using Codes = Words;
    static Scales scales(const char* all, int64_t input) {
        const char* p = scales_of<Mxfp4Layout>(all, input);
        const Words exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const Words more = _mm512_slli_epi32(_mm512_sub_epi32(exponents, _mm512_set1_epi32(127)), 7);
        return _mm512_or_si512(_mm512_slli_epi32(more, 16), _mm512_and_si512(more, _mm512_set1_epi32(0xffff)));
    }
    static Codes codes(const char* p) { return load_words(reinterpret_cast<const uint32_t*>(p)); }
    static Words next(Codes& codes, const Scales& scales) {
        const Words pairs =
            _mm512_setr_epi32(0x3f000000, 0x3fc03f80, 0x40404000, 0x40c04080,  // 0 to 6
                              static_cast<int>(0xbf008000), static_cast<int>(0xbfc0bf80), static_cast<int>(0xc040c000),
                              static_cast<int>(0xc0c0c080),  // -0 to -6
                              0x3f000000, 0x3fc03f80, 0x40404000, 0x40c04080, static_cast<int>(0xbf008000),
                              static_cast<int>(0xbfc0bf80), static_cast<int>(0xc040c000), static_cast<int>(0xc0c0c080));
        const Words numbers = _mm512_permutexvar_epi16(codes, pairs);  // the lower 5 bits choose
        const __mmask32 other = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(7));
        codes = _mm512_srli_epi16(codes, 4);
        return _mm512_mask_add_epi16(numbers, other, numbers, scales);
    }
};

// With its bits in the lower exponent's and the upper fraction's place, a float32 is 2^-120 of the number.
template <class Form>
struct Fp8ByteWords : Form {
    static constexpr int kWords = 1, kPairedRows = 0, kDirectRows = 12;
    static constexpr int64_t kScaleInputs = kBlockInputs;
    struct Scales {
        __m512 by[2];
    };
    using Codes = Words;
    static Scales scales_from(__m512 of_outputs) {
        const __m512 by = _mm512_mul_ps(of_outputs, _mm512_set1_ps(0x1p120f));
        return {{doubled<0>(by), doubled<8>(by)}};
    }
    static Codes codes(const char* p) {
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static Words next(Codes& codes, const Scales& scales) {
        const Words rest = _mm512_and_si512(_mm512_slli_epi16(codes, 4), _mm512_set1_epi16(0x7f0));
        const Words sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
        const Words halves = _mm512_ternarylogic_epi32(rest, _mm512_slli_epi16(codes, 8), sign, 0xf8);  // a | b & c
        const __m512 one = _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
        const Words upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        const __m512 other = _mm512_castsi512_ps(_mm512_and_si512(halves, upper));
        return reinterpret_cast<Words>(
            rounded_pairs(_mm512_mul_ps(one, scales.by[0]), _mm512_mul_ps(other, scales.by[1])));
    }
};

struct Fp8Words : Fp8ByteWords<Fp8Layout> {
    static Scales scales(const char* all, int64_t input) {
        return scales_from(_mm512_loadu_ps(scales_of<Fp8Layout>(all, input)));
    }
};

struct Mxfp8Words : Fp8ByteWords<Mxfp8Layout> {
    static Scales scales(const char* all, int64_t input) {
        const char* p = scales_of<Mxfp8Layout>(all, input);
        const Words exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return scales_from(_mm512_castsi512_ps(_mm512_slli_epi32(exponents, 23)));
    }
};

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
