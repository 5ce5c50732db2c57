// Causal attention of prompts, tile by tile with a running softmax (FlashAttention; Dao et al. 2022, algorithm 1).
//
// Tiles begin at multiples of kPromptTile of the prompt, and no value of a row enters another row. So neither the cut
// of a prompt into calls nor the batch changes a bit of the result.
#pragma once
#include "bias.h"
#include "partial.h"
#include "prefill_words.h"
#include "tiles.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

template <class Words>
struct Prefill {
    using Word = typename Words::Word;
    static constexpr int kSteps = Words::kElements;
    static constexpr int kRows = Words::kRows;
    static constexpr int kVecsPerTile = kPromptTile / W;
    static constexpr int kWeights = kPromptTile / kSteps;  // words of a row
    static constexpr float kSlack = 8.0f;  // weights grow to 2^kSlack before the reference exponent follows

    static constexpr PromptKernel kernel() { return {kSteps, kRows, Words::kWordBlock, pack, attend}; }

    static void pack(const PromptPackArgs& a) {
        const PromptLayout& l = *a.layout;
        for (int64_t i = 0; i < a.count; ++i) {
            const int lane = static_cast<int>((a.position + i) % kPromptTile);
            Word* tile = tile_at(a, i);
            if (lane == 0) clear(l, tile);
            copy_row(a.k, a.type, i * a.k_stride, l.k_dim, tile + lane, kPromptTile);
        }
        for (int64_t i = 0; i < a.count;) {
            const int lane = static_cast<int>((a.position + i) % kPromptTile);
            Word* row = tile_at(a, i) + l.v_offset + lane / kSteps * l.v_pad;
            const int64_t v = i * a.v_stride;
            if (kSteps == 2 && lane % 2 == 0 && i + 1 < a.count) {
                for (int d = 0; d < l.v_dim; ++d)
                    row[d] = Words::put(Words::put(Word{}, 0, Words::load(a.v, a.type, v + d)), 1,
                                        Words::load(a.v, a.type, v + a.v_stride + d));
                i += 2;
            } else {
                for (int d = 0; d < l.v_dim; ++d)
                    row[d] = Words::put(row[d], lane % kSteps, Words::load(a.v, a.type, v + d));
                ++i;
            }
        }
    }

    static Word* tile_at(const PromptPackArgs& a, int64_t i) {
        return reinterpret_cast<Word*>(a.tiles) + (a.position + i) / kPromptTile * a.layout->tile_stride;
    }

    // Positions to come have weight zero, but zero times NaN is NaN; so they are cleared, and so are words beyond a
    // key.
    static void clear(const PromptLayout& l, Word* tile) {
        const int words = (l.k_dim + kSteps - 1) / kSteps;
        __builtin_memset(tile + words * kPromptTile, 0, (l.k_words - words) * kPromptTile * sizeof(Word));
        __builtin_memset(tile + l.v_offset, 0, (l.tile_words - l.v_offset) * sizeof(Word));
    }

    // Writes a row of n elements as words that lie `step` apart.
    static inline void copy_row(const void* rows, ActType type, int64_t at, int n, Word* to, int step) {
        for (int u = 0; u < n / kSteps; ++u) to[int64_t{u} * step] = Words::word(rows, type, at + u * kSteps);
        if (n % kSteps != 0)
            to[int64_t{n / kSteps} * step] = Words::put(Word{}, 0, Words::load(rows, type, at + n - 1));
    }

    // The state of an item's rows, padded to whole passes.
    struct Rows {
        int count, padded;
        Word* q;        // [padded][k_words]
        float* o;       // [padded][v_pad]
        float* m;       // [padded] reference exponents
        float* sums;    // [padded][W] partial sums of weights
        float* mixes;   // [padded][bias dim] of biases
        float* scores;  // [2][kRows][kPromptTile]
        Word* weights;  // [kRows][kPromptTile / kSteps]
    };

    static Rows carve(const PromptAttendArgs& a) {
        const PromptLayout& l = *a.layout;
        Rows w;
        w.count = static_cast<int>(a.count) * a.group;
        w.padded = (w.count + kRows - 1) / kRows * kRows;
        uint8_t* at = a.scratch;
        const auto take = [&](int64_t words) {
            uint8_t* p = at;
            at += (words * 4 + 63) / 64 * 64;
            return p;
        };
        w.q = reinterpret_cast<Word*>(take(int64_t{w.padded} * l.k_words));
        w.o = reinterpret_cast<float*>(take(int64_t{w.padded} * l.v_pad));
        w.m = reinterpret_cast<float*>(take(w.padded));
        w.sums = reinterpret_cast<float*>(take(int64_t{w.padded} * W));
        w.mixes = reinterpret_cast<float*>(take(int64_t{w.padded} * a.bias.dim));
        w.scores = reinterpret_cast<float*>(take(2 * kRows * kPromptTile));
        w.weights = reinterpret_cast<Word*>(take(kRows * kPromptTile));
        return w;
    }

    static void prepare(const PromptAttendArgs& a, const Rows& w) {
        const PromptLayout& l = *a.layout;
        for (int r = 0; r < w.padded; ++r) {
            Word* q = w.q + int64_t{r} * l.k_words;
            __builtin_memset(q, 0, sizeof(Word) * l.k_words);
            if (r < w.count) {
                const int64_t from = r / a.group * a.q_stride + static_cast<int64_t>(r % a.group) * l.k_dim;
                copy_row(a.q, a.type, from, l.k_dim, q, 1);
            }
            w.m[r] = -__builtin_inff();
        }
        __builtin_memset(w.o, 0, sizeof(float) * w.padded * l.v_pad);
        __builtin_memset(w.sums, 0, sizeof(float) * w.padded * W);
        if (a.bias.dim == 0) return;
        __builtin_memset(w.mixes, 0, sizeof(float) * w.padded * a.bias.dim);
        load_mixes(a.bias, a.type, a.q_stride, a.group, 1, 0, w.count, w.mixes);
    }

    // Turns the scores of one row into weights; lanes outside [lo, hi) weigh nothing. The query is the last of the
    // positions up to `hi` of the tile.
    static inline void weigh(const PromptAttendArgs& a, const float* scores, int64_t lo, int64_t hi, const float* mixes,
                             float& m, float* sums, float* o, Word* weights) {
        F x[kVecsPerTile];
        const bool biased = a.bias.dim > 0;
        const F scale = vset(a.softcap > 0 || biased ? a.scale : a.scale * kLog2E);
        for (int t = 0; t < kVecsPerTile; ++t) x[t] = vmul(vload(scores + t * W), scale);
        if (a.softcap > 0)
            for (F& s : x) s = vmul(vsoftcap(s, a.softcap), vset(kLog2E));
        if (biased) {
            add_biases(a.bias, mixes, 0, hi, x);
            for (F& s : x) s = vmul(s, vset(kLog2E));
        }
        if (lo > 0 || hi < kPromptTile)
            for (int t = 0; t < kVecsPerTile; ++t)
                x[t] = keep_lanes(x[t], static_cast<int>(lo) - t * W, static_cast<int>(hi) - t * W);
        F top = x[0];
        for (int t = 1; t < kVecsPerTile; ++t) top = vmax(top, x[t]);
        if (any_greater(top, m + kSlack)) {
            const float raised = hmax(top);
            rescale(exp2_one(m - raised), a.layout->v_pad, sums, o);
            m = raised;
        }
        const F reference = vset(m == -__builtin_inff() ? 0.0f : m);
        for (F& s : x) s = Words::exp2(vsub(s, reference));
        Words::emit(x, sums, weights);
    }

    static __attribute__((noinline)) void rescale(float factor, int v_pad, float* sums, float* o) {
        const F f = vset(factor);
        vstore(sums, vmul(vload(sums), f));
        for (int d = 0; d < v_pad; d += W) vstore(o + d, vmul(vload(o + d), f));
    }

    // One pass of rows against one tile.
    struct Pass {
        int64_t tile;
        int row, keys;  // keys: positions of the tile that any of the rows sees
    };

    // Returns the end of the positions of `tile` that row r sees.
    static int64_t seen(const PromptAttendArgs& a, const Rows& w, int r, int64_t tile) {
        const int last = r < w.count ? r : w.count - 1;
        return a.position + last / a.group + 1 - tile * kPromptTile;
    }

    // Returns the first position of `tile` that row r sees; below zero if it sees earlier tiles.
    static int64_t first_seen(const PromptAttendArgs& a, const Rows& w, int r, int64_t tile) {
        const int64_t before = tile * kPromptTile;
        return a.window.first(seen(a, w, r, tile) + before) - before;
    }

    // Moves on to the next pass that sees anything; returns false if there is none.
    static bool next(const PromptAttendArgs& a, const Rows& w, Pass& p) {
        while (true) {
            p.row += kRows;
            if (p.row >= w.padded) {
                p.row = 0;
                ++p.tile;
            }
            if (p.tile * kPromptTile >= a.position + a.count) return false;
            const int64_t most = seen(a, w, p.row + kRows - 1, p.tile);
            p.keys = static_cast<int>(most < kPromptTile ? most : kPromptTile);
            if (most > 0 && first_seen(a, w, p.row, p.tile) < kPromptTile) return true;
        }
    }

    static const Word* tile_of(const PromptAttendArgs& a, int64_t tile) {
        return reinterpret_cast<const Word*>(a.tiles) + tile * a.layout->tile_stride;
    }

    static void score(const PromptAttendArgs& a, const Rows& w, const Pass& p, float* scores) {
        const int words = a.layout->k_words;
        Words::template multiply<false>(w.q + int64_t{p.row} * words, words, tile_of(a, p.tile), kPromptTile, words,
                                        scores, kPromptTile, (p.keys + W - 1) / W);
    }

    static void weigh_rows(const PromptAttendArgs& a, const Rows& w, const Pass& p, const float* scores) {
        for (int i = 0; i < kRows; ++i) {
            const int r = p.row + i;
            const int64_t hi = seen(a, w, r, p.tile), lo = first_seen(a, w, r, p.tile);
            const float* mixes = w.mixes + int64_t{r} * a.bias.dim;
            weigh(a, scores + i * kPromptTile, lo, hi, mixes, w.m[r], w.sums + r * W,
                  w.o + int64_t{r} * a.layout->v_pad, w.weights + i * kWeights);
        }
    }

    static void add_values(const PromptAttendArgs& a, const Rows& w, const Pass& p) {
        const PromptLayout& l = *a.layout;
        Words::template multiply<true>(w.weights, kWeights, tile_of(a, p.tile) + l.v_offset, l.v_pad,
                                       (p.keys + kSteps - 1) / kSteps, w.o + int64_t{p.row} * l.v_pad, l.v_pad,
                                       l.v_pad / W);
    }

    // Prefetches a pass's share of the next tile.
    static void fetch(const PromptAttendArgs& a, const Rows& w, const Pass& p) {
        if ((p.tile + 1) * kPromptTile >= a.position + a.count) return;
        const uint8_t* tile = reinterpret_cast<const uint8_t*>(tile_of(a, p.tile + 1));
        const int64_t bytes = a.layout->tile_words * 4;
        for (int64_t at = bytes * p.row / w.padded / 64 * 64; at < bytes * (p.row + kRows) / w.padded; at += 64)
            __builtin_prefetch(tile + at, 0, 2);
    }

    static void write(const PromptAttendArgs& a, const Rows& w, int r) {
        const PromptLayout& l = *a.layout;
        float total = hsum(vload(w.sums + r * W)), share = 1.0f;
        if (const float own = sink_of(a.sinks, r / a.group, r % a.group); own != -__builtin_inff()) {
            const float sink = own * kLog2E, top = sink > w.m[r] ? sink : w.m[r];
            share = exp2_one(w.m[r] - top);
            total = total * share + exp2_one(sink - top);
        }
        const float* o = w.o + int64_t{r} * l.v_pad;
        const int64_t at = r / a.group * a.out_stride + static_cast<int64_t>(r % a.group) * l.v_dim;
        const F f = vset(share / total);
        int d = 0;
        for (; d + W <= l.v_dim; d += W) {
            const F x = vmul(vload(o + d), f);
            if (a.type == ActType::kF32) {
                vstore(static_cast<float*>(a.out) + at + d, x);
            } else {
                store_bf16(static_cast<uint16_t*>(a.out) + at + d, x);
            }
        }
        for (; d < l.v_dim; ++d) store_act(a.out, a.type, at + d, o[d] * (share / total));
    }

    static inline void swap(float* (&pair)[2]) {
        float* first = pair[0];
        pair[0] = pair[1];
        pair[1] = first;
    }

    static void attend(const PromptAttendArgs& a) {
        const typename Words::Unit unit;
        const Rows w = carve(a);
        prepare(a, w);
        const int64_t first = a.window.first(a.position + 1) / kPromptTile;
        Pass now{first, -kRows, 0};
        float* scores[2] = {w.scores, w.scores + kRows * kPromptTile};
        next(a, w, now);
        score(a, w, now, scores[0]);
        for (bool more = true; more; swap(scores)) {
            // The next scores do not depend on these weights; they keep the multipliers busy until the weights are
            // ready.
            fetch(a, w, now);
            weigh_rows(a, w, now, scores[0]);
            Pass following = now;
            more = next(a, w, following);
            if (more) score(a, w, following, scores[1]);
            add_values(a, w, now);
            now = following;
        }
        for (int r = 0; r < w.count; ++r) write(a, w, r);
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
