// How vectors multiply the codes of weights by rows that are rounded to int8.
//
// Each struct describes codes of half a panel as they lie there (code_layout.h): of 32 inputs they are taken kTimes
// times, some inputs of all 16 outputs at a time, in kVectors vectors of whole numbers. Sums of products are exact.
#pragma once
#include "round_rows.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

// Sums of products of unsigned and signed bytes, of four each in a lane of 32 bits.
struct ByteProducts {
    using Inputs = RoundedInputs<int8_t>;
    static constexpr int kAtOnce = 4;  // times whose products a sum takes
    static constexpr int kScales = 1;  // of an output, for 32 inputs

    static __m256i add(__m256i sum, __m256i codes, __m256i x) {  // two sums of 16 bits in a lane
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
        asm("" : "+x"(sum));  // else GCC adds products as a tree, which spills all of them
        return sum;
    }
    static __m256i whole(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
    static __m256i nibbles(const char* both, int time) {
        const __m256i of = ints_at(both);
        return _mm256_and_si256(time % 2 == 0 ? of : _mm256_srli_epi16(of, 4), _mm256_set1_epi8(15));
    }
};

// Codes of 4 bits of int4 and of GGUF's forms: of 4 outputs each, 8 inputs at a time, in two lanes of an output. A
// sum of 16 bits has 8 products of at most 15 * 127.
struct NibbleVectors : ByteProducts {
    static constexpr int kVectors = 4, kTimes = 4;

    static __m128i order() { return _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }
    static __m256i at(const char* block, int time, int vector) {
        return nibbles(block + (time / 2 * kVectors + vector) * 32, time);
    }
    static __m256i inputs(const int8_t* x, int time) {
        int64_t eight;
        std::memcpy(&eight, x + 8 * time, sizeof eight);
        return _mm256_set1_epi64x(eight);
    }
    // Returns the sums of 8 outputs.
    static __m256i by_output(const __m256i* sums, int upper) {
        return _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[2 * upper], sums[2 * upper + 1]), 0xd8);
    }
};

// Codes of 4 bits of a table, as signed numbers: their magnitudes by inputs that take their signs.
// scales: Of an output, for 32 inputs. at_once: Times whose products a sum of 16 bits takes.
template <const int8_t (&table)[16], int scales, int at_once>
struct TableVectors : NibbleVectors {
    static constexpr int kScales = scales, kAtOnce = at_once;

    static __m256i at(const char* block, int time, int vector) {
        const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), NibbleVectors::at(block, time, vector));
    }
    static __m256i add(__m256i sum, __m256i codes, __m256i x) {
        return NibbleVectors::add(sum, _mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
    }
};

inline constexpr int8_t kTwiceFp4From12[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Codes of MXFP4: of 8 outputs each, 4 inputs at a time. They are shown as twice their number, plus 12, so a sum of
// 16 bits has 8 products of at most 24 * 127.
struct Fp4Vectors : ByteProducts {
    static constexpr int kVectors = 2, kTimes = 8;

    static __m128i order() { return _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15); }
    static __m256i at(const char* block, int time, int vector) {
        const __m128i of = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kTwiceFp4From12));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(of),
                                   nibbles(block + (time / 2 * kVectors + vector) * 32, time));
    }
    static __m256i inputs(const int8_t* x, int time) {
        int32_t four;
        std::memcpy(&four, x + 4 * time, sizeof four);
        return _mm256_set1_epi32(four);
    }
    static __m256i by_output(const __m256i* sums, int upper) { return sums[upper]; }
};

// Codes of a byte, signed, as numbers of 16 bits: of 8 outputs each, 2 inputs at a time.
struct ByteVectors {
#if defined(__AVX512VNNI__)
    using Inputs = RoundedInputs<int8_t>;  // rounded_avx512.h
#else
    using Inputs = RoundedInputs<int16_t>;
#endif
    static constexpr int kVectors = 2, kTimes = 16, kAtOnce = 16, kScales = 1;

    static __m128i order() { return _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
    static __m256i at(const char* block, int time, int vector) {
        const __m256i of = ints_at(block + time * 32);
        return _mm256_srai_epi16(vector == 0 ? _mm256_slli_epi16(of, 8) : of, 8);
    }
    static __m256i inputs(const int16_t* x, int time) {
        int32_t two;
        std::memcpy(&two, x + 2 * time, sizeof two);
        return _mm256_set1_epi32(two);
    }
    static __m256i add(__m256i sum, __m256i codes, __m256i x) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes, x));
        asm("" : "+x"(sum));  // as above
        return sum;
    }
    static __m256i whole(__m256i sum) { return sum; }
    static __m256i by_output(const __m256i* sums, int upper) { return sums[upper]; }
};

// The same with a scale for 16 inputs, and without starts.
struct TwoScaleVectors : ByteVectors {
    static constexpr int kAtOnce = 8, kScales = 2;
};

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
