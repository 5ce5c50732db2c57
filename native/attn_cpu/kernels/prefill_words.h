// The GEMM of panels of words, and prompts held as floats.
#pragma once
#include "math.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

constexpr int kPanelVecs = W == 16 ? 4 : 2;  // vectors of a row of c that are kept in registers
constexpr int kPanelRows = 6;

// Computes c[r][j] = (kAdd ? c[r][j] : 0) + sum over u of a[r][u] * b[u][j] for kPanelRows rows r and NC * W columns j.
// u ascends, so that the bits of a row do not depend on other rows. Strides are in words.
template <class Words, int NC, bool kAdd>
static __attribute__((noinline)) void multiply_panel(const typename Words::Word* a, int64_t a_stride,
                                                     const typename Words::Word* b, int64_t b_stride, int units,
                                                     float* c, int64_t c_stride) {
    F acc[kPanelRows][NC];
#pragma GCC unroll 8
    for (int r = 0; r < kPanelRows; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < NC; ++j) acc[r][j] = kAdd ? vload(c + r * c_stride + j * W) : vzero();
    }
    for (int u = 0; u < units; ++u, ++a, b += b_stride) {
#pragma GCC unroll 8
        for (int r = 0; r < kPanelRows; ++r) {
            const typename Words::Word x = a[r * a_stride];
#pragma GCC unroll 4
            for (int j = 0; j < NC; ++j) acc[r][j] = Words::fma(acc[r][j], b + j * W, x);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kPanelRows; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < NC; ++j) vstore(c + r * c_stride + j * W, acc[r][j]);
    }
}

// The common part of words that are multiplied in vector registers.
template <class Words>
struct VectorWords {
    static constexpr int kRows = kPanelRows;  // of one pass
    static constexpr int kWordBlock = 1;      // words of a row of a come in multiples of it
    struct Unit {
        Unit() {}
    };

    // Computes c = a * b, or c += a * b, for kRows rows and `vecs` vectors of columns, in panels of nearly equal width.
    template <bool kAdd, class Word>
    static void multiply(const Word* a, int64_t a_stride, const Word* b, int64_t b_stride, int units, float* c,
                         int64_t c_stride, int vecs) {
        for (int panels = (vecs + kPanelVecs - 1) / kPanelVecs; panels > 0; --panels) {
            const int n = (vecs + panels - 1) / panels;
            switch (n) {
                case 1:
                    multiply_panel<Words, 1, kAdd>(a, a_stride, b, b_stride, units, c, c_stride);
                    break;
                case 2:
                    multiply_panel<Words, 2, kAdd>(a, a_stride, b, b_stride, units, c, c_stride);
                    break;
                default:
                    if constexpr (kPanelVecs > 2) {
                        if (n == 3) {
                            multiply_panel<Words, 3, kAdd>(a, a_stride, b, b_stride, units, c, c_stride);
                        } else {
                            multiply_panel<Words, 4, kAdd>(a, a_stride, b, b_stride, units, c, c_stride);
                        }
                    }
            }
            vecs -= n;
            b += n * W;
            c += n * W;
        }
    }
};

struct FloatWords : VectorWords<FloatWords> {
    using Word = float;
    static constexpr int kElements = 1;  // of a word

    static inline float load(const void* p, ActType type, int64_t i) { return load_act(p, type, i); }
    static inline Word put(Word, int, float x) { return x; }  // element `at` of a word
    static inline Word word(const void* p, ActType type, int64_t i) { return load_act(p, type, i); }
    static inline F exp2(F t) { return vexp2(t); }
    static inline F fma(F acc, const Word* b, Word a) { return vfma(vload(b), vset(a), acc); }

    // Stores the weights of one row as the next GEMM reads them, and adds them to the row's partial sums.
    static inline void emit(const F* x, float* sums, Word* p) {
        F sum = vload(sums);
        for (int t = 0; t < kPromptTile / W; ++t) {
            sum = vadd(sum, x[t]);
            vstore(p + t * W, x[t]);
        }
        vstore(sums, sum);
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
