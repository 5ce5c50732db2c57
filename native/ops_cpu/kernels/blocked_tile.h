// The tiles of a GEMM where registers hold the sums of few rows: the weights come from the first cache for each group
// of rows in turn, and sums wait in memory meanwhile.
#pragma once
#include <algorithm>
#include <type_traits>

#include "by_rows.h"
#include "units_vector.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

constexpr int kColumns = kVectors * kWidth;  // outputs of a pass
constexpr int kFetchEvery = 2;               // words: a cache line of what comes next, at about memory's pace

// Adds R rows' products with some words of kColumns outputs to their sums.
template <class Unit, int R>
__attribute__((noinline)) void add_products(const typename Unit::Value* const* values, const uint32_t* weights,
                                            int64_t words, float* sums, Lines& next) {
    typename Unit::Sum s[R][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) s[r][v] = load_vector<typename Unit::Sum>(sums + r * kPanel + v * kWidth);
    const typename Unit::Value* x[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) x[r] = values[r];
    const auto part = [&](auto number, int64_t i) __attribute__((always_inline)) {
        constexpr int p = decltype(number)::value;
        typename Unit::Sum w[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
            w[v] = Unit::template factor<p>(load_vector<Ints>(weights + i * kPanel + v * kWidth));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) s[r][v] = Unit::add(s[r][v], x[r][i * Unit::kParts + p], w[v]);
    };
    for (int64_t i = 0; i < words; ++i) {
        if (i % kFetchEvery == 0 && next.begin < next.end) {
            __builtin_prefetch(next.begin, 0, 2);
            next.begin += kLine;
        }
        part(std::integral_constant<int, 0>{}, i);
        if constexpr (Unit::kParts == 2) part(std::integral_constant<int, 1>{}, i);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store_vector(sums + r * kPanel + v * kWidth, s[r][v]);
}

// Multiplies R rows by a panel. Sums run along the words in order, whatever R is.
template <class Unit, class Out, int R>
void blocked_tile(const Tile& t) {
    constexpr int kGroups = (R + Unit::kRows - 1) / Unit::kRows, kLess = R / kGroups, kMore = R % kGroups;
    constexpr int64_t kWords = kValues / Unit::kParts, kXBytes = Unit::kXWords * sizeof(uint32_t);
    const int64_t all = t.words / Unit::kXWords;
    alignas(kLine) float sums[R * kPanel];
    alignas(kLine) typename Unit::Value memory[R * kValues];
    const typename Unit::Value* values[R];
    for (int r = 0; r < R; ++r) std::memcpy(sums + r * kPanel, t.panel, kPanel * sizeof(float));
    const uint32_t* const weights = t.panel + Unit::kHeads * kPanel;
    Lines next = t.next;
    for (int64_t first = 0; first < all; first += kWords) {
        const int64_t words = std::min(kWords, all - first);
        for (int r = 0; r < R; ++r)
            values[r] = Unit::values(t.x + r * t.x_bytes + first * kXBytes, words, memory + r * kValues);
        for (int column = 0; column < kPanel; column += kColumns) {
            const uint32_t* from = weights + first * kPanel + column;
            int row = 0;
            for (int g = 0; g < kMore; ++g, row += kLess + 1)
                add_products<Unit, kLess + 1>(values + row, from, words, sums + row * kPanel + column, next);
            for (int g = kMore; g < kGroups; ++g, row += kLess)
                add_products<Unit, kLess>(values + row, from, words, sums + row * kPanel + column, next);
        }
    }
    for (int r = 0; r < R; ++r) {
        Unit::finish(sums + r * kPanel, t.panel);
        auto* __restrict out = reinterpret_cast<typename Out::Element*>(t.out + r * t.out_bytes);
        for (int j = 0; j < t.columns; ++j) out[j] = Out::narrow(sums[r * kPanel + j]);
    }
}

template <class Unit, class Out>
struct BlockedTile {
    template <int R>
    static constexpr auto* kernel = blocked_tile<Unit, Out, R>;
};

template <class Unit, class Out>
constexpr TileKernel blocked_tiles = by_rows<BlockedTile<Unit, Out>>;

// Weights of bfloat16 for activations of float32. Sums are those of the same weights in float32.
constexpr FormKernels widened = {{}, blocked_tiles<WidenedBfloat16, VectorToFloat32>, kTileRows, Type::f32, true};

// Multiplies a function of each row's first half by the second half, rounding as the steps of a fused kernel would.
template <class Out, float (*f)(float)>
void vector_gate(int64_t rows, const char* results, char* out, int64_t out_bytes) {
    constexpr int kHalf = kPanel / 2;
    for (int64_t r = 0; r < rows; ++r) {
        const auto* __restrict x = reinterpret_cast<const typename Out::Element*>(results) + r * kPanel;
        auto* __restrict y = reinterpret_cast<typename Out::Element*>(out + r * out_bytes);
        for (int j = 0; j < kHalf; ++j) y[j] = Out::narrow(Out::rounded(f(Out::load(x[j]))) * Out::load(x[kHalf + j]));
    }
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
