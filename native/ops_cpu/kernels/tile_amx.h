// The tiles of a GEMM in the tile registers of AMX.
//
// Rows are multiplied by a part of a panel at a time, which stays in the first cache meanwhile. Sums wait in memory, as
// wide as they are in registers: their bits do not depend on how rows and inputs are divided.
#pragma once
#include <algorithm>

#include "expand_avx512.h"
#include "tile_unit.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

using namespace hpcdecode::tiles;

constexpr int kSide = 16;            // rows and words of a tile register
constexpr int64_t kPartWords = 256;  // of a panel
constexpr size_t kSumBytes = kPanel * sizeof(float), kWordBytes = sizeof(uint32_t);

using Sums = float[kSide][kPanel];  // of a strip's rows

struct Part {
    int64_t first, last;  // words
};

// Rows in strips of one height. Where they do not come out even, neighbours have some rows in common.
struct Strips {
    explicit Strips(int rows) : count((rows + kSide - 1) / kSide), height((rows + count - 1) / count), rows(rows) {}
    int first(int i) const { return count == 1 ? 0 : i * (rows - height) / (count - 1); }

    int count, height, rows;
};

struct PairProducts {
    static constexpr int kHeads = 1;
    template <int C, int A, int B>
    static void add() {
        tile_add_pairs<C, A, B>();
    }
    static const float* start(const uint32_t* panel) { return reinterpret_cast<const float*>(panel); }
    static __m512 values(const float* sums, const uint32_t*, int vector) {
        return _mm512_loadu_ps(sums + vector * kLanes);
    }
};

struct QuadProducts {
    static constexpr int kHeads = 2;
    template <int C, int A, int B>
    static void add() {
        tile_add_quads<C, A, B>();
    }
    // Both factors are signed here: what panels begin with is for unsigned ones.
    static const float* start(const uint32_t*) {
        static constexpr float kZeros[kPanel] = {};
        return kZeros;
    }
    static __m512 values(const float* sums, const uint32_t* panel, int vector) {
        return Int8::values(_mm512_loadu_si512(sums + vector * kLanes), panel, vector);
    }
};

// Words of a panel, as they lie there. Few rows wait for them, so they are fetched ahead, those of the next panel
// included. For many the processor does that by itself: prefetches would take line buffers from the loads of tiles.
template <class Products>
class PlainWords {
  public:
    PlainWords(const Tile& t, const Strips& strips)
        : weights_(t.panel + Products::kHeads * kPanel), fetches_(strips.count <= 2) {}

    const uint32_t* first_use(int64_t word) const {
        const uint32_t* const at = again(word);
        if (fetches_)
            for (int line = 0; line < kLinesOfStep; ++line)
                __builtin_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes + line * kLine, 0, 2);
        return at;
    }
    const uint32_t* again(int64_t word) const { return weights_ + word * kPanel; }

  private:
    static constexpr int64_t kAheadBytes = 8 << 10;
    static constexpr int kLinesOfStep = kSide * kPanel * static_cast<int>(kWordBytes) / static_cast<int>(kLine);

    const uint32_t* weights_;
    bool fetches_;
};

// Words of a panel in few bits. Each step is expanded at its first use, while those before are multiplied, and kept if
// it is used again. Meanwhile some lines of what comes next are fetched.
template <class Form>
class ExpandedWords {
  public:
    ExpandedWords(const Tile& t, const Strips& strips)
        : tile_(t), next_(t.next), kept_(strips.count > 2 ? kPartWords : kStepsKept * kSide) {}

    const uint32_t* first_use(int64_t word) {
        for (int line = 0; line < kLinesOfStep && next_.begin < next_.end; ++line, next_.begin += kLine)
            __builtin_prefetch(next_.begin, 0, 2);
        const auto* panel = reinterpret_cast<const char*>(tile_.panel);
        uint32_t* const to = memory_ + word % kept_ * kPanel;
        for (int half = 0; half < 2; ++half)
            expand_half<Form>(panel, 2 * tile_.words, half, 2 * word, 2 * (word + kSide), to);
        return to;
    }
    const uint32_t* again(int64_t word) const { return memory_ + word % kept_ * kPanel; }

  private:
    static_assert(kSide == kBlockInputs / 2);
    static constexpr int64_t kStepBytes = 2 * (Form::kBlockBytes + Form::kScaleBytes * kBlockInputs / Form::kGroup);
    static constexpr int kStepsKept = 4;  // where none is used again
    static constexpr int kLinesOfStep = static_cast<int>((kStepBytes + kLine - 1) / kLine);

    const Tile& tile_;
    Lines next_;
    int64_t kept_;  // words
    alignas(kLine) uint32_t memory_[kPartWords * kPanel];
};

// Adds the products of one or two strips with a part of a panel, as tiles are configured, to their sums.
// weights: Returns the words of a step. start: What the sums of every row begin with, or null once they have begun.
template <class Products, bool two, class Weights>
inline void add_products(const char* x, const char* other, int64_t x_bytes, const Part& part, Weights weights,
                         Sums* sums, const float* start) {
    float* const at = sums[0][0];
    float* const below = sums[two ? 1 : 0][0];
    const size_t apart = start != nullptr ? 0 : kSumBytes;
    const float* const from = start != nullptr ? start : at;
    const float* const from_below = start != nullptr ? start : below;
    tile_load<0>(from, apart);
    tile_load<1>(from + kSide, apart);
    if constexpr (two) {
        tile_load<2>(from_below, apart);
        tile_load<3>(from_below + kSide, apart);
    }
    for (int64_t i = part.first; i < part.last; i += kSide) {
        tile_load_once<4>(x + i * kWordBytes, x_bytes);
        const uint32_t* const panel = weights(i);
        tile_load<6>(panel, kPanel * kWordBytes);
        tile_load<7>(panel + kSide, kPanel * kWordBytes);
        Products::template add<0, 4, 6>();
        Products::template add<1, 4, 7>();
        if constexpr (two) {
            tile_load_once<5>(other + i * kWordBytes, x_bytes);
            Products::template add<2, 5, 6>();
            Products::template add<3, 5, 7>();
        }
    }
    tile_store<0>(at, kSumBytes);
    tile_store<1>(at + kSide, kSumBytes);
    if constexpr (two) {
        tile_store<2>(below, kSumBytes);
        tile_store<3>(below + kSide, kSumBytes);
    }
}

// Adds the products of all strips with a part of a panel to their sums.
template <class Products, class Words>
inline void add_part(const Tile& t, const Strips& strips, const Part& part, Words& panel, Sums* sums) {
    const float* const start = part.first == 0 ? Products::start(t.panel) : nullptr;
    const auto row = [&](int i) { return t.x + strips.first(i) * t.x_bytes; };
    const auto first_use = [&](int64_t word) { return panel.first_use(word); };
    const auto again = [&](int64_t word) { return panel.again(word); };
    if (strips.count == 1)
        return add_products<Products, false>(row(0), nullptr, t.x_bytes, part, first_use, sums, start);
    add_products<Products, true>(row(0), row(1), t.x_bytes, part, first_use, sums, start);
    int i = 2;
    for (; i + 1 < strips.count; i += 2)
        add_products<Products, true>(row(i), row(i + 1), t.x_bytes, part, again, sums + i, start);
    if (i < strips.count) add_products<Products, false>(row(i), nullptr, t.x_bytes, part, again, sums + i, start);
}

template <class Products, class Words>
void add_panel(const Tile& t, const Strips& strips, Sums* sums) {
    Words panel(t, strips);
    TileUnit unit;
    for (Part part{0, 0}; part.last < t.words;) {
        const int64_t most = strips.count > 2 ? kPartWords : t.words;  // where nothing is used again, all of it
        const int64_t left = std::min(t.words - part.last, most), whole = left / kSide * kSide;
        part = {part.last, part.last + (whole > 0 ? whole : left)};
        unit.configure_gemm(strips.height, static_cast<int>(whole > 0 ? kSide : left));
        add_part<Products>(t, strips, part, panel, sums);
    }
}

template <class Products, class Out, class Words>
void amx_tile(const Tile& t, int rows) {
    alignas(kLine) Sums sums[kMostTileRows / kSide];
    const Strips strips(rows);
    add_panel<Products, Words>(t, strips, sums);
    for (int i = 0; i < strips.count; ++i)
        for (int r = 0; r < strips.height; ++r)
            for (int v = 0; v < kPanel / kLanes; ++v) {
                const int count = t.columns - v * kLanes;
                char* const out = t.out + (strips.first(i) + r) * t.out_bytes;
                if (count > 0) Out::store(out, v * kLanes, count, Products::values(sums[i][r], t.panel, v));
            }
}

template <class Products, class Out>
constexpr TileKernel amx_tiles = amx_tile<Products, Out, PlainWords<Products>>;

template <class Factors>
struct InTiles {
    using Form = typename Factors::Words;
    static constexpr FormKernels kKernels = {{form_tiles<Factors, VectorFloat32, VectorToFloat32>,
                                              {amx_tile<PairProducts, ToBfloat16, ExpandedWords<Form>>, kMostTileRows}},
                                             expand_words<Form>,
                                             by_rounded_rows<Factors>()};
};

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
