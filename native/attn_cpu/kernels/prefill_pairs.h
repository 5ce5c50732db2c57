// Prompts held as pairs of bfloat16, multiplied by AVX512_BF16.
//
// Weights are rounded to bfloat16. Their sum is that of the rounded ones, so that equal values come out exactly.
#pragma once
#include "prefill_words.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

struct PairWords : VectorWords<PairWords> {
    using Word = uint32_t;
    static constexpr int kElements = 2;

    static inline uint16_t load(const void* p, ActType, int64_t i) { return static_cast<const uint16_t*>(p)[i]; }
    static inline Word put(Word old, int half, uint16_t x) { return half == 0 ? x : (old & 0xffffu) | Word{x} << 16; }
    static inline Word word(const void* p, ActType, int64_t i) {
        Word x;
        __builtin_memcpy(&x, static_cast<const uint16_t*>(p) + i, sizeof x);
        return x;
    }
    static inline F exp2(F t) { return vexp2_coarse(t); }
    static inline __m512bh spread(Word pair) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)); }
    static inline F fma(F acc, const Word* b, Word a) {
        return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(b), spread(a));
    }

    static inline void emit(const F* x, float* sums, Word* p) {
        const __m512bh ones = spread(0x3f803f80u);
        F sum = vload(sums);
        for (int t = 0; t < kPromptTile / W; t += 2) {
            const __m512bh pairs = _mm512_cvtne2ps_pbh(x[t + 1], x[t]);
            _mm512_storeu_si512(p + t / 2 * W, (__m512i)pairs);
            sum = _mm512_dpbf16_ps(sum, pairs, ones);
        }
        vstore(sums, sum);
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
