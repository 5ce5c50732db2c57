// The tiles of a GEMM.
#pragma once
#include "by_rows.h"
#include "units_avx512.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

// Multiplies R rows by a panel: sums stay in registers, the panel's words come from cache, those of the rows are
// broadcast.
template <class Unit, class Out, int R>
void tile(const Tile& t) {
    constexpr int kVectors = kPanel / kLanes;
    typename Unit::Sum sums[R][kVectors];
#pragma GCC unroll 16  // here and below: else they would lie in memory
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Unit::start(t.panel + v * kLanes);
    const uint32_t* weights = t.panel + Unit::kHeads * kPanel;
    const char *x = t.x, *next = t.next.begin;
    for (int64_t i = 0; i < t.words; ++i, weights += kPanel, x += sizeof(uint32_t)) {
        Words w[kVectors];
        for (int v = 0; v < kVectors; ++v) w[v] = load_words(weights + v * kLanes);
        if (next < t.next.end) {
            __builtin_prefetch(next, 0, 2);
            next += kLanes * sizeof(uint32_t);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Words a = Unit::everywhere(x + r * t.x_bytes);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[r][v] = Unit::add(sums[r][v], a, w[v]);
        }
    }
    char* out = t.out;
    const int64_t out_bytes = t.out_bytes;
    const int columns = t.columns;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, out += out_bytes)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const int count = columns - v * kLanes;
            if (count > 0) Out::store(out, v * kLanes, count, Unit::values(sums[r][v], t.panel, v));
        }
}

template <class Unit, class Out>
struct RegisterTile {
    template <int R>
    static constexpr auto* kernel = tile<Unit, Out, R>;
};

template <class Unit, class Out>
constexpr TileKernel tiles = by_rows<RegisterTile<Unit, Out>>;

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
