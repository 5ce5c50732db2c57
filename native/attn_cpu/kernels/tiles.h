// The addresses of a chunk's tiles for one head, and of what is read after them.
#pragma once
#include "storage.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

constexpr Prefetching kPrefetching = HPCDECODE_PREFETCHING;

// Prefetches a line for every line that is read, in the order in which runs are visited, up to the end of the next run.
// Where a chunk is four runs, which are read in turn, those of the next chunk are prefetched.
//
// Some processors prefetch elements of two bytes and more by themselves in passes of few rows; prefetching here would
// only take the place of theirs (kPrefetching).
struct Ahead {
    const uint8_t* at;
    const uint8_t* end;
    const uint8_t* const* next;
    const uint8_t* const* last;
    size_t bytes;

    // Begins to prefetch while `run` is read; `then` are the `count` runs of what is read after it.
    Ahead(const uint8_t* run, size_t bytes, const uint8_t* const* then, int count)
        : at(run + (bytes < kPrefetching.ahead || count > 1 ? bytes : kPrefetching.ahead)),
          end(run + bytes),
          next(then),
          last(then + count - 1),
          bytes(bytes) {}

    template <bool kOn, int kBytes>
    inline void advance() {
        if constexpr (!kOn) return;
        if (end - at >= kBytes) return lines<kBytes>();
        for (int i = 0; i < kBytes; i += 64) {
            if (at >= end) {
                at = *next;
                end = at + bytes;
                if (next < last) ++next;  // the last one again and again: passes of many rows read a run several times
            }
            lines<64>();
        }
    }

  private:
    template <int kBytes>
    inline void lines() {
#pragma GCC unroll 16
        for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(at + i, 0, kPrefetching.locality);
        at += kBytes;
    }
};

// Returns where the query of row `row` of a head begins in `a.q`, in elements.
inline int64_t query_at(const AttendArgs& a, int head, int row) {
    const int all = a.first_row + row;
    return all / a.group * a.q_stride + static_cast<int64_t>(head * a.group + all % a.group) * a.kv.layout->k_dim;
}

// The common part of kernels that work in vector registers.
struct VectorKernel {
    static constexpr bool kTiles = false;
    static constexpr int kSoftmaxLines = 0;
    static constexpr int kTallRows = 0;     // of a tall pass, if there are any
    static constexpr int kRows = kMaxRows;  // of one pass
    struct Unit {
        template <int MR>
        void shape() {}
    };
};

struct Tiles {
    const uint8_t* k[kTilesPerChunk];         // first unit
    const uint8_t* v[kTilesPerChunk];         // V units of the tile's run
    const uint8_t* k_scales[kTilesPerChunk];  // whole numbers: 16 each
    const uint8_t* v_scales[kTilesPerChunk];
    size_t middles;   // between the scales of a tile and its middles
    size_t k_step;    // between units of a K tile
    size_t v_column;  // 16 dims of all tokens of a run
    size_t v_tile;    // of that, before the next tile; 0 where a tile is a run
    int first, last;  // tiles of this chunk that hold visible tokens
};

// The runs that hold the tiles of a chunk, for the first head. Tiles without visible tokens repeat a neighbour. What is
// chosen lies in whole runs, unless it is gathered.
struct ChunkRuns {
    const uint8_t* run[kTilesPerChunk];
    int tile[kTilesPerChunk];  // tile of the chunk that stands for tile i
    int first, last;
    int count;  // of different runs: one, or one a tile
};

// The positions [lo, hi) that a row sees.
struct Span {
    int64_t lo, hi;
};

inline ChunkRuns find_runs(const HeadView& kv, const uint8_t* gathered, const int32_t* chosen, int64_t base,
                           Span seen) {
    const HeadLayout& l = *kv.layout;
    const int64_t end = seen.hi < base + kChunk ? seen.hi : base + kChunk;
    ChunkRuns c;
    c.first = seen.lo > base ? static_cast<int>((seen.lo - base) / kTile) : 0;
    c.last = static_cast<int>((end - base + kTile - 1) / kTile);
    c.count = l.by_rows || l.run_tokens == kChunk ? 1 : kTilesPerChunk;
    for (int i = 0; i < kTilesPerChunk; ++i) {
        c.tile[i] = i < c.first ? c.first : i >= c.last ? c.last - 1 : i;
        if (l.by_rows) {
            c.run[i] = gathered;
        } else if (l.run_tokens == kChunk && i > 0) {
            c.run[i] = c.run[0];
        } else {
            int64_t token = base + (l.run_tokens == kChunk ? 0 : c.tile[i] * kTile);
            if (chosen != nullptr) token = chosen[token / l.run_tokens];
            c.run[i] = kv.base + kv.blocks[token / l.block_tokens] * kv.block_bytes +
                       static_cast<size_t>(token % l.block_tokens / l.run_tokens) * l.run_bytes;
        }
    }
    return c;
}

template <class Store>
inline Tiles tiles_of(const HeadLayout& l, const ChunkRuns& c, size_t skip) {
    using K = typename Store::K;
    using V = typename Store::V;
    const bool together = l.run_tokens == kChunk;
    Tiles t;
    t.first = c.first;
    t.last = c.last;
    t.middles = static_cast<size_t>(l.run_tokens) * 2;
    t.k_step = static_cast<size_t>(k_turn<K>(l)) * K::kUnitBytes;
    t.v_column = static_cast<size_t>(l.run_tokens / V::kSteps) * V::kUnitBytes;
    t.v_tile = together ? static_cast<size_t>(kTile / V::kSteps) * V::kUnitBytes : 0;
    for (int i = 0; i < kTilesPerChunk; ++i) {
        const uint8_t* run = c.run[i] + skip;
        const int token = together ? c.tile[i] * kTile : 0;
        t.k[i] = run + k_unit_at<K>(l, token, 0);
        t.v[i] = run + l.v_units;  // of a latent layer there are none: see `lay_values`
        t.k_scales[i] = run + scale_at(l, 0, token);
        t.v_scales[i] = run + scale_at(l, l.latent ? 0 : l.k_scales, token);
    }
    return t;
}

// Returns the tiles of K's dims from k_split on.
template <class Store>
inline Tiles rest_of(const HeadLayout& l, const Tiles& tiles) {
    Tiles t = tiles;
    for (const uint8_t*& k : t.k) k += l.k_split / Store::K::kSteps * t.k_step;
    return t;
}

// The units of columns `first` to first + NC of V in one tile.
template <class V, int NC>
struct Columns {
    static constexpr int kSide = NC < V::kTurn ? NC : V::kTurn;  // lie side by side
    const uint8_t* data;
    size_t column;

    Columns(const Tiles& tiles, int tile, int first)
        : data(tiles.v[tile] + first * tiles.v_column + tile * tiles.v_tile * kSide), column(tiles.v_column) {}
    inline const uint8_t* unit(int u, int c) const {
        return data + static_cast<size_t>(u * kSide + c % kSide) * V::kUnitBytes + c / kSide * kSide * column;
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
