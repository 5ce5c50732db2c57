// The softmax: scores to weights, and the state that a query row carries from chunk to chunk.
//
// A weight is 2^(score * scale * log2 e - m) with a reference exponent m, which is raised only if a score exceeds it by
// more than kSlack. Nothing can overflow, and most chunks need neither a horizontal maximum nor a rescaled accumulator.
#pragma once
#include "bias.h"
#include "plain_kernel.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

constexpr float kSlack = 8.0f;
constexpr int kChunkVecs = kTilesPerChunk * kVecs;

// Returns the positions that a row sees.
inline Span visible(const AttendArgs& a, int row) {
    const int64_t hi = a.length - a.new_tokens + (a.first_row + row) / a.group + 1;
    return {a.window.first(hi), hi};
}

// Returns whether every row sees all of a chunk. The last token sees most, and its window begins last.
inline bool whole(const AttendArgs& a, int64_t base) {
    const int64_t first_end = a.length - a.new_tokens + 1;
    return base + kChunk <= first_end && base >= a.window.first(a.length);
}

// The state of all rows, by head * rows of a head + row.
struct Softmax {
    float* m;        // reference exponent
    float* bound;    // score above which m is raised; -inf while empty
    float* sums;     // [16] each: of weights
    float* middles;  // [16] each: of weighted middles of V; null for a type without
    float* queries;  // of the elements of a query; with middles of K
    float* mixes;    // [bias dim] each: of biases
    float* acc;      // [v_pad] each: of weighted values
    int v_pad;
    float c;  // exponent per unit of score

    void clear(size_t rows) const {
        for (size_t r = 0; r < rows; ++r) {
            m[r] = 0.0f;
            bound[r] = -__builtin_inff();
        }
        __builtin_memset(sums, 0, rows * kTile * sizeof(float));
        if (middles != nullptr) __builtin_memset(middles, 0, rows * kTile * sizeof(float));
        __builtin_memset(acc, 0, rows * v_pad * sizeof(float));
    }

    __attribute__((noinline)) void raise(int row, float top) const {
        const float now = top * c, alpha = bound[row] == -__builtin_inff() ? 0.0f : exp2_one(m[row] - now);
        m[row] = now;
        bound[row] = (now + kSlack) / c;
        for (int j = 0; j < kTile; j += W) scale(sums + row * kTile + j, alpha);
        for (int j = 0; middles != nullptr && j < kTile; j += W) scale(middles + row * kTile + j, alpha);
        for (int d = 0; d < v_pad; d += W) scale(acc + static_cast<size_t>(row) * v_pad + d, alpha);
    }
    static inline void scale(float* p, float alpha) { vstore(p, vmul(vload(p), vset(alpha))); }

    static inline float sum_of(const float* parts) {
        F x = vload(parts);
        for (int j = W; j < kTile; j += W) x = vadd(x, vload(parts + j));
        return hsum(x);
    }
    inline float sum(size_t row) const { return sum_of(sums + row * kTile); }

    // Adds the weighted middles of V to the weighted values.
    inline void add_middles(size_t row) const {
        if (middles == nullptr) return;
        const F middle = vset(sum_of(middles + row * kTile));
        for (float *p = acc + row * v_pad, *end = p + v_pad; p < end; p += W) vstore(p, vadd(vload(p), middle));
    }
};

// The scales and middles of a chunk's 64 tokens, as floats.
template <class Store>
struct Scales {
    static constexpr int kBytes = kChunk * 2 * (2 + Store::K::kMiddle + Store::V::kMiddle);  // in the cache
    float k[kChunk], v[kChunk], k_middle[kChunk], v_middle[kChunk];

    explicit Scales(const Tiles& tiles) {
        widen(tiles.k_scales, 0, k);
        widen(tiles.v_scales, 0, v);
        if constexpr (Store::K::kMiddle) widen(tiles.k_scales, tiles.middles, k_middle);
        if constexpr (Store::V::kMiddle) widen(tiles.v_scales, tiles.middles, v_middle);
    }
    // Scales the scores of K before k_split in `scores`, and those of its other dims in `others`, and adds them.
    void join(const Tiles& tiles, int rows, float* scores, const float* others) {
        float other[kChunk];
        widen(tiles.k_scales, tiles.middles, other);
        for (int r = 0; r < rows; ++r)
            for (int j = 0; j < kChunk; j += W) {
                float* s = scores + r * kChunk + j;
                const F first = vmul(vload(s), vload(k + j));
                vstore(s, vfma(vload(others + r * kChunk + j), vload(other + j), first));
            }
        for (int j = 0; j < kChunk; j += W) vstore(k + j, vset(1.0f));
    }
    static inline void widen(const uint8_t* const* tiles, size_t skip, float* out) {
        for (int t = 0; t < kTilesPerChunk; ++t)
            for (int j = 0; j < kTile; j += W)
                vstore(out + t * kTile + j, load_bf16(reinterpret_cast<const uint16_t*>(tiles[t] + skip) + j));
    }
};

inline void multiply(F* s, const float* by) {
#pragma GCC unroll 16
    for (int i = 0; i < kChunkVecs; ++i) s[i] = vmul(s[i], vload(by + i * W));
}

// Adds products of 64 weights to 16 partial sums.
inline void add_products(const F* p, const float* by, float* sums) {
    for (int j = 0; j < kVecs; ++j) {
        F x = vload(sums + j * W);
#pragma GCC unroll 16
        for (int i = j; i < kChunkVecs; i += kVecs) x = vfma(p[i], vload(by + i * W), x);
        vstore(sums + j * W, x);
    }
}

inline void hide(const AttendArgs& a, int row, int64_t base, F* s) {
    const Span seen = visible(a, row);
    const int lo = seen.lo > base ? static_cast<int>(seen.lo - base < kChunk ? seen.lo - base : kChunk) : 0;
    const int hi = seen.hi < base + kChunk ? static_cast<int>(seen.hi > base ? seen.hi - base : 0) : kChunk;
    for (int i = 0; i < kChunkVecs; ++i) s[i] = keep_lanes(s[i], lo - i * W, hi - i * W);
}

// Turns scores of `rows` rows of a head, from `row` on, into weights as the kernel reads them. A position that a row
// does not see gets a weight of exactly zero.
template <class Kernel>
__attribute__((noinline)) void soften(const AttendArgs& a, const Softmax& x,
                                      const Scales<typename Kernel::Storage>* scales, int row, int rows, int state,
                                      int64_t base, const float* scores, float* weights, Ahead& shared) {
    using Store = typename Kernel::Storage;
    constexpr bool kScaled = Store::kScaled;
    const bool capped = a.softcap > 0.0f, all = whole(a, base);
    const F scale = vset(x.c);
    Ahead ahead = shared;
    for (int r = 0; r < rows; ++r, ++state, scores += kChunk, weights += kChunk) {
        ahead.template advance<true, Kernel::kSoftmaxLines * 64>();
        F s[kChunkVecs];
#pragma GCC unroll 16
        for (int i = 0; i < kChunkVecs; ++i) s[i] = vload(scores + i * W);
        if constexpr (kScaled) multiply(s, scales->k);
        if constexpr (Store::K::kMiddle) {
            const F sum = vset(x.queries[state]);
#pragma GCC unroll 16
            for (int i = 0; i < kChunkVecs; ++i) s[i] = vfma(vload(scales->k_middle + i * W), sum, s[i]);
        }
        if (capped)
            for (int i = 0; i < kChunkVecs; ++i) s[i] = vsoftcap(vmul(s[i], vset(a.scale)), a.softcap);
        if (a.bias.dim > 0) {
            for (int i = 0; i < kChunkVecs; ++i) s[i] = vmul(s[i], vset(a.scale));
            add_biases(a.bias, x.mixes + static_cast<size_t>(state) * a.bias.dim, base, visible(a, row + r).hi, s);
        }
        if (!all) hide(a, row + r, base, s);
        F top = s[0];
#pragma GCC unroll 16
        for (int i = 1; i < kChunkVecs; ++i) top = vmax(top, s[i]);
        if (any_greater(top, x.bound[state])) x.raise(state, hmax(top));
        const F m = vset(x.m[state]);
#pragma GCC unroll 16
        for (int i = 0; i < kChunkVecs; ++i) s[i] = Kernel::exp2(vsub(vmul(s[i], scale), m));  // exactly 1 at the top
        float* sums = x.sums + static_cast<size_t>(state) * kTile;
        if constexpr (kScaled) {
            add_weights(s, sums);
            if constexpr (Store::V::kMiddle)
                add_products(s, scales->v_middle, x.middles + static_cast<size_t>(state) * kTile);
            multiply(s, scales->v);
            Kernel::store(s, weights);
        } else {
            Kernel::emit(s, sums, weights);
        }
    }
    shared = ahead;
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
