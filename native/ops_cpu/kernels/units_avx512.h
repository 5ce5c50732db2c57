// The multiply-add of a GEMM, on words of 16 outputs.
#pragma once
#include <immintrin.h>

#include "math.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

constexpr int kLanes = 16;
using Words = __m512i;

inline Words load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }

inline Words broadcast(const char* word) {
    int32_t x;
    std::memcpy(&x, word, sizeof x);
    return _mm512_set1_epi32(x);
}

inline __mmask16 first_lanes(int count) { return (1u << count) - 1; }

// What sums of float32 have in common.
struct FloatSums {
    static constexpr int kHeads = 1;
    using Sum = __m512;
    static Sum start(const uint32_t* panel) { return _mm512_loadu_ps(panel); }
    static Words everywhere(const char* x) { return broadcast(x); }
    static __m512 values(Sum sum, const uint32_t*, int) { return sum; }
};

struct Float32 : FloatSums {
    static Sum add(Sum sum, Words a, Words b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
    }
};

struct ToFloat32 {
    static constexpr int64_t kPanelBytes = kPanel * sizeof(float);
    static __m512 load(const char* row, int column) {
        return _mm512_loadu_ps(reinterpret_cast<const float*>(row) + column);
    }
    static __m512 rounded(__m512 x) { return x; }
    static void store(char* row, int column, int count, __m512 x) {
        auto* to = reinterpret_cast<float*>(row) + column;
        count < kLanes ? _mm512_mask_storeu_ps(to, first_lanes(count), x) : _mm512_storeu_ps(to, x);
    }
};

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
struct Bfloat16 : FloatSums {
    static Sum add(Sum sum, Words a, Words b) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }
};

// One factor is unsigned: x + 128. The sums begin with -128 times those of the weights.
struct Int8 {
    static constexpr int kHeads = 2;
    using Sum = __m512i;
    static Sum start(const uint32_t* panel) { return load_words(panel); }
    static Words everywhere(const char* x) {
        return _mm512_xor_si512(broadcast(x), _mm512_set1_epi32(static_cast<int>(0x80808080u)));
    }
    static Sum add(Sum sum, Words a, Words b) {
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // GCC 12 moves sums about with the intrinsic
        return sum;
    }
    static __m512 values(Sum sum, const uint32_t* panel, int vector) {
        return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_loadu_ps(panel + kPanel + vector * kLanes));
    }
};
#endif

struct ToBfloat16 {
    static constexpr int64_t kPanelBytes = kPanel * sizeof(uint16_t);
    static __m512 load(const char* row, int column) {
        return wide(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(reinterpret_cast<const uint16_t*>(row) + column)));
    }
    static __m512 wide(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
    static __m256i narrow(__m512 x) {
#if defined(__AVX512BF16__)
        return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
        const __m512i all = _mm512_castps_si512(x), half = _mm512_set1_epi32(0x7fff);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(all, 16), _mm512_set1_epi32(1));
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(all, half), odd), 16));
#endif
    }
    static __m512 rounded(__m512 x) { return wide(narrow(x)); }
    static void store(char* row, int column, int count, __m512 x) {
        auto* to = reinterpret_cast<uint16_t*>(row) + column;
        count < kLanes ? _mm256_mask_storeu_epi16(to, first_lanes(count), narrow(x))
                       : _mm256_storeu_epi16(to, narrow(x));
    }
};

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
