// The tiles of a GEMM where registers hold the sums of few rows: the weights come from the first cache for each group
// of rows in turn, and sums wait in memory meanwhile.
#pragma once
#include <algorithm>
#include <utility>

#include "units_vector.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

constexpr int kAllVectors = kPanel / kWidth;
constexpr int kFewRows = kGroup * kVectors / kAllVectors;  // rows whose sums of a whole panel fit registers
constexpr int64_t kWritten = 256, kWords = 128;            // steps whose factors, or words, stay in the first cache

// Factors as the words of a panel hold them.
template <class Unit>
struct InWords {
    static constexpr int kParts = Unit::kParts, kRows = Unit::kRows;
    static constexpr int64_t kStride = kPanel;  // of 4 bytes
    template <int part>
    static typename Unit::Sum at(const uint32_t* from) {
        return Unit::template factor<part>(load_vector<Ints>(from));
    }
};

// Factors that were written out, of so many outputs side by side.
template <class Unit, int64_t outputs = kVectors * kWidth>
struct Written {
    static constexpr int kParts = 1, kRows = kGroup;
    static constexpr int64_t kStride = outputs;
    template <int>
    static typename Unit::Sum at(const uint32_t* from) {
        return load_vector<typename Unit::Sum>(from);
    }
};

// Some rows of values, a stride apart.
template <class Value>
struct ValueRows {
    const Value* first;
    int64_t stride;

    const Value* row(int r) const { return first + r * stride; }
};

// Memory that is fetched meanwhile, a cache line every some steps.
struct Fetch {
    const char *from, *end;
    int64_t every;

    // Spreads the lines over all steps, but for those that would come faster than memory's pace.
    Fetch(const Lines& all, int64_t steps, int64_t least)
        : from(all.begin), end(all.end), every(std::max(least, steps / std::max<int64_t>(lines(), 1))) {}
    int64_t lines() const { return (end - from) / kLine; }
};

// Adds R rows' products with the factors of some steps to their sums, of V vectors of outputs.
template <class Unit, class From, int R, int V>
__attribute__((noinline)) void add_products(ValueRows<typename Unit::Value> rows, const uint32_t* from, int64_t steps,
                                            float* sums, Fetch& next) {
    typename Unit::Sum s[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) s[r][v] = load_vector<typename Unit::Sum>(sums + r * kPanel + v * kWidth);
    const typename Unit::Value* x[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) x[r] = rows.row(r);
    const auto part = [&](auto number, int64_t i) __attribute__((always_inline)) {
        constexpr int p = decltype(number)::value;
        typename Unit::Sum w[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) w[v] = From::template at<p>(from + i * From::kStride + v * kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) s[r][v] = Unit::add(s[r][v], x[r][i * From::kParts + p], w[v]);
    };
    const auto step = [&](int64_t i) __attribute__((always_inline)) {
        part(std::integral_constant<int, 0>{}, i);
        if constexpr (From::kParts == 2) part(std::integral_constant<int, 1>{}, i);
    };
    const int64_t every = next.every, fetching = std::min(steps, next.lines() * every);
    int64_t i = 0;
    for (; i + every <= fetching; next.from += kLine) {
        __builtin_prefetch(next.from, 0, 2);
        for (const int64_t end = i + every; i < end; ++i) step(i);
    }
    for (; i < steps; ++i) step(i);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store_vector(sums + r * kPanel + v * kWidth, s[r][v]);
}

template <class Unit>
using AddProducts = void (*)(ValueRows<typename Unit::Value>, const uint32_t*, int64_t, float*, Fetch&);

// add_products for each number of rows, less one.
template <class Unit, class From, int V, class Less>
struct ByCount;

template <class Unit, class From, int V, int... kLess>
struct ByCount<Unit, From, V, std::integer_sequence<int, kLess...>> {
    static constexpr AddProducts<Unit> kKernels[] = {add_products<Unit, From, kLess + 1, V>...};
};

template <class Unit, class From, int V, int most>
constexpr const AddProducts<Unit>* kByCount = ByCount<Unit, From, V, std::make_integer_sequence<int, most>>::kKernels;

// Adds the products of all rows, a group of `most` after the other, for V vectors of outputs.
template <class Unit, class From, int V = kVectors, int most = From::kRows>
void add_groups(int rows, ValueRows<typename Unit::Value> values, const uint32_t* from, int64_t steps, float* sums,
                Fetch& next) {
    const int groups = (rows + most - 1) / most, less = rows / groups, more = rows % groups;
    for (int g = 0, row = 0; g < groups; ++g) {
        const int count = less + (g < more ? 1 : 0);
        kByCount<Unit, From, V, most>[count - 1]({values.row(row), values.stride}, from, steps, sums + row* kPanel,
                                                 next);
        row += count;
    }
}

// Writes the factors of some words, of kVectors vectors of outputs.
template <class Unit>
void write_factors(const uint32_t* words, int64_t count, uint32_t* to) {
    const auto part = [&](auto number, const uint32_t* from) __attribute__((always_inline)) {
        for (int v = 0; v < kVectors; ++v, to += kWidth)
            store_vector(to, InWords<Unit>::template at<decltype(number)::value>(from + v * kWidth));
    };
    for (int64_t i = 0; i < count; ++i) {
        part(std::integral_constant<int, 0>{}, words + i * kPanel);
        if constexpr (Unit::kParts == 2) part(std::integral_constant<int, 1>{}, words + i * kPanel);
    }
}

void begin_sums(const Tile& t, int rows, float* sums) {
    for (int r = 0; r < rows; ++r) std::memcpy(sums + r * kPanel, t.panel, kPanel * sizeof(float));
}

template <class Out>
void store_sums(const Tile& t, int rows, const float* sums) {
    for (int r = 0; r < rows; ++r) {
        auto* __restrict out = reinterpret_cast<typename Out::Element*>(t.out + r * t.out_bytes);
        for (int j = 0; j < t.columns; ++j) out[j] = Out::narrow(sums[r * kPanel + j]);
    }
}

// Returns the rows of a tile from value `first` on.
template <class Value>
ValueRows<Value> values_from(const Tile& t, int64_t first) {
    return {reinterpret_cast<const Value*>(t.x) + first, t.x_bytes / static_cast<int64_t>(sizeof(Value))};
}

// Returns how often a tile goes through the steps of half a panel, or of all of it for few rows.
constexpr int passes(int rows) {
    return rows <= kFewRows ? 1 : kPanel / (kVectors * kWidth) * ((rows + kGroup - 1) / kGroup);
}

// Multiplies rows by a panel. Sums run along the words in order, however many rows there are.
template <class Unit, class Out>
void blocked_tile(const Tile& t, int rows) {
    const bool few = rows <= kFewRows, written = rows > (Unit::kWrittenGroups - 1) * kGroup;
    const int64_t all = t.words / Unit::kXWords, most = written ? kWritten / Unit::kParts : kWords;
    const int64_t parts = written ? Unit::kParts : 1;  // steps of a word
    alignas(kLine) float sums[kMostTileRows * kPanel];
    alignas(kLine) uint32_t factors[kWritten * kVectors * kWidth];
    begin_sums(t, rows, sums);
    Fetch next(t.next, passes(rows) * parts * all, Unit::kParts == 2 && !written ? 1 : 2);
    for (int64_t first = 0; first < all; first += most) {
        const int64_t words = std::min(most, all - first);
        const auto values = values_from<typename Unit::Value>(t, first * Unit::kParts);
        const uint32_t* const from = t.panel + (Unit::kHeads + first) * kPanel;
        if (few) {
            add_groups<Unit, InWords<Unit>, kAllVectors, kFewRows>(rows, values, from, words, sums, next);
            continue;
        }
        for (int column = 0; column < kPanel; column += kVectors * kWidth) {
            if (written) {
                write_factors<Unit>(from + column, words, factors);
                add_groups<Unit, Written<Unit>>(rows, values, factors, words * Unit::kParts, sums + column, next);
            } else {
                add_groups<Unit, InWords<Unit>>(rows, values, from + column, words, sums + column, next);
            }
        }
    }
    for (int r = 0; r < rows; ++r) Unit::finish(sums + r * kPanel, t.panel);
    store_sums<Out>(t, rows, sums);
}

// Weights of 16 bits for activations of float32. Sums are those of the same weights in float32.
template <class Unit>
constexpr FormKernels widened = {{{blocked_tile<Unit, VectorToFloat32>, kMostTileRows, true}}};

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
