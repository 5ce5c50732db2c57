// The tiles of a GEMM of rows that are rounded to int8 by weights in few bits, in products of whole numbers.
//
// Of 32 inputs, or as many as share a scale, products are summed in whole numbers, exactly. So a sum is that of
// scale of the row * (scale of the weights * whole + start of the weights * sum of the row).
// CPUs with VNNI in 512 bits have tiles of their own (rounded_avx512.h).
#pragma once
#include <type_traits>

#include "blocked_tile.h"
#include "code_vectors.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

#if defined(__AVX512VL__)
constexpr int kRoundedRows = 6;  // rows whose sums fit registers
#else
constexpr int kRoundedRows = 3;
#endif
constexpr int64_t kRoundedBlocks = 8;  // blocks whose codes stay in the first cache for all rows

// Codes as a panel holds them.
template <class Form>
struct InPanel {
    using Vectors = typename Form::Vectors;
    static constexpr int64_t kBytes = Form::kBlockBytes;  // of a block

    static __m256i at(const char* block, int time, int vector) { return Vectors::at(block, time, vector); }
};

// Codes that were written out as they are multiplied.
template <class Form>
struct WrittenOut {
    using Vectors = typename Form::Vectors;
    static constexpr int64_t kBytes = Vectors::kTimes * Vectors::kVectors * 32;

    static __m256i at(const char* block, int time, int vector) {
        return ints_at(block + (time * Vectors::kVectors + vector) * 32);
    }
    static void write(const char* block, char* to) {
        for (int time = 0; time < Vectors::kTimes; ++time)
            for (int v = 0; v < Vectors::kVectors; ++v, to += 32)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), Vectors::at(block, time, v));
    }
};

template <class Inputs>
struct RoundedRows {
    const char* first;
    int64_t row_bytes;

    const Inputs* row(int r) const { return reinterpret_cast<const Inputs*>(first + r * row_bytes); }
};

// Some blocks of half a panel.
struct CodeBlocks {
    const char* codes;
    const Affine* by;  // kScales of each
    int64_t count;
};

// Memory that is fetched meanwhile, as many cache lines a block.
struct LinePace {
    const char *from, *end;
    int64_t lines;

    LinePace(const Lines& all, int64_t blocks) : from(all.begin), end(all.end) {
        lines = ((end - from) / kLine + blocks - 1) / blocks;
    }
    void fetch() {
        for (int64_t i = 0; i < lines && from < end; ++i, from += kLine) __builtin_prefetch(from, 0, 2);
    }
};

// Adds R rows' products with some blocks to their sums of half a panel.
template <class From, int R, class Vectors = typename From::Vectors>
__attribute__((noinline)) void add_rounded(RoundedRows<typename Vectors::Inputs> rows, CodeBlocks blocks, float* sums,
                                           LinePace& next) {
    constexpr int kPart = Vectors::kTimes / Vectors::kScales;  // times of a scale
    const Affine* by = blocks.by;
    for (int64_t b = 0; b < blocks.count; ++b) {
        const char* const codes = blocks.codes + b * From::kBytes;
        next.fetch();
#pragma GCC unroll 2
        for (int part = 0; part < Vectors::kTimes; part += kPart, ++by) {
            __m256i all[R][Vectors::kVectors];
#pragma GCC unroll 4
            for (int first = part; first < part + kPart; first += Vectors::kAtOnce) {
                __m256i s[R][Vectors::kVectors];
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                    for (int v = 0; v < Vectors::kVectors; ++v) s[r][v] = _mm256_setzero_si256();
#pragma GCC unroll 16
                for (int time = first; time < first + Vectors::kAtOnce; ++time) {
                    __m256i x[R];
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) x[r] = Vectors::inputs(rows.row(r)[b].x, time);
#pragma GCC unroll 4
                    for (int v = 0; v < Vectors::kVectors; ++v) {
                        const __m256i w = From::at(codes, time, v);
#pragma GCC unroll 8
                        for (int r = 0; r < R; ++r) s[r][v] = Vectors::add(s[r][v], w, x[r]);
                    }
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                    for (int v = 0; v < Vectors::kVectors; ++v) {
                        const __m256i whole = Vectors::whole(s[r][v]);
                        all[r][v] = first == part ? whole : _mm256_add_epi32(all[r][v], whole);
                    }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
                for (int upper = 0; upper < 2; ++upper) {
                    const auto& x = rows.row(r)[b];
                    float* const sum = sums + r * kPanel + upper * kEight;
                    const __m256 starts = _mm256_mul_ps(by->start[upper], _mm256_set1_ps(x.sum));
                    const __m256 whole = _mm256_cvtepi32_ps(Vectors::by_output(all[r], upper));
                    const __m256 own = _mm256_fmadd_ps(by->scale[upper], whole, starts);
                    _mm256_storeu_ps(sum, _mm256_fmadd_ps(_mm256_set1_ps(x.scale), own, _mm256_loadu_ps(sum)));
                }
        }
    }
}

// Adds the products of all rows, some after the other.
template <class From, int R = kRoundedRows, class Inputs>
void add_rounded_rows(int rows, RoundedRows<Inputs> values, const CodeBlocks& blocks, float* sums, LinePace& next) {
    for (; rows >= R; rows -= R, values.first += R * values.row_bytes, sums += R * kPanel)
        add_rounded<From, R>(values, blocks, sums, next);
    if constexpr (R > 1) add_rounded_rows<From, R - 1>(rows, values, blocks, sums, next);
}

// Multiplies rows by a panel. Sums run along the blocks in order, however many rows there are.
template <class Form, class Out>
void rounded_tile(const Tile& t, int rows) {
    using Vectors = typename Form::Vectors;
    using Inputs = typename Vectors::Inputs;
    const bool few = rows <= kRoundedRows;
    const int64_t inputs = t.words * 4 / static_cast<int64_t>(sizeof(typename Out::Element));
    const int64_t all = inputs / kBlockInputs;
    alignas(kLine) float sums[kMostTileRows * kPanel];
    alignas(kLine) char written[kRoundedBlocks * WrittenOut<Form>::kBytes];
    Affine by[kRoundedBlocks * Vectors::kScales];
    begin_sums(t, rows, sums);
    LinePace next(t.next, 2 * all * ((rows + kRoundedRows - 1) / kRoundedRows));
    for (int64_t first = 0; first < all; first += kRoundedBlocks) {
        const int64_t count = std::min(kRoundedBlocks, all - first);
        const RoundedRows<Inputs> values{t.x + first * static_cast<int64_t>(sizeof(Inputs)), t.x_bytes};
        for (int h = 0; h < 2; ++h) {
            const char* half = reinterpret_cast<const char*>(t.panel) + kHeadBytes + h * half_bytes<Form>(inputs);
            const char* codes = half + scale_bytes<Form>(inputs) + first * Form::kBlockBytes;
            for (int64_t i = 0; i < count * Vectors::kScales; ++i)
                by[i] = Form::affine(half, first * kBlockInputs + i * kBlockInputs / Vectors::kScales);
            if (few) {
                add_rounded_rows<InPanel<Form>>(rows, values, {codes, by, count}, sums + h * kHalf, next);
                continue;
            }
            for (int64_t b = 0; b < count; ++b)
                WrittenOut<Form>::write(codes + b * Form::kBlockBytes, written + b * WrittenOut<Form>::kBytes);
            add_rounded_rows<WrittenOut<Form>>(rows, values, {written, by, count}, sums + h * kHalf, next);
        }
    }
    store_sums<Out>(t, rows, sums);
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
