// Converts new rows of K and V and writes them into the KV cache.
#pragma once
#include "storage.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

template <class Store>
struct Append {
    static constexpr int kStretch = 128;  // dims that are converted at once

    template <class Act>
    static inline float widen(Act x) {
        if constexpr (sizeof(Act) == 4) return x;
        return float_of_bf16(x);
    }

    // Returns the scale of a row as it is stored, or 1 for a type without scales.
    template <class Act>
    static inline uint16_t scale_of(const Act* x, int dims) {
        if constexpr (Store::kScaled) {
            return bf16_of(largest(x, dims) / Store::kLevels);
        }
        return 0x3f80;
    }
    template <class Act>
    static inline float largest(const Act* x, int dims) {
        float top[kTile] = {};
        const auto raise = [&](int lane, float v) {
            const float size = v < 0 ? -v : v;
            top[lane] = size > top[lane] ? size : top[lane];
        };
        int d = 0;
        for (; d + kTile <= dims; d += kTile)
            for (int lane = 0; lane < kTile; ++lane) raise(lane, widen(x[d + lane]));
        for (; d < dims; ++d) raise(0, widen(x[d]));
        for (int lane = 1; lane < kTile; ++lane) raise(0, top[lane]);
        return top[0];
    }
    static inline float inverse(uint16_t scale) {
        const float x = float_of_bf16(scale);
        return x > 0.0f ? 1.0f / x : 0.0f;
    }

    // Converts dims [first, last) of x to dim `at` of a row.
    template <class Act>
    static inline void convert(const Act* x, int first, int last, float by, uint8_t* row, int at) {
        float scaled[kStretch];
        for (int d = first; d < last; ++d) scaled[d - first] = widen(x[d]) * by;
        Store::put(row, at, scaled, last - first);
    }
    template <class Each>
    static inline void stretches(int dims, Each each) {
        for (int d = 0; d < dims; d += kStretch) each(d, d + kStretch < dims ? d + kStretch : dims);
    }

    // Copy dims [first, last) of a token's K or V from a row, which begins with dim `first`, to their place in a run.
    static inline void place_k(const HeadLayout& l, const uint8_t* row, int first, int last, uint8_t* run, int token) {
        uint8_t* unit = run + k_unit_at<Store>(l, token, first);
        const size_t step = static_cast<size_t>(k_turn<Store>(l)) * Store::kUnitBytes;
        for (int d = 0; d < last - first; d += Store::kSteps, unit += step) Store::place(row, d, unit, token % kTile);
    }
    static inline void place_v(const HeadLayout& l, const uint8_t* row, int first, int last, uint8_t* run, int token) {
        for (int d = first; d < last; d += kTile) {
            uint8_t* unit = run + v_unit_at<Store>(l, token, d);
            for (int lane = 0; lane < kTile; ++lane)
                Store::move(row, d - first + lane, unit, lane, token % Store::kSteps);
        }
    }

    // Writes K and V of one token to their place in a run.
    template <class Act>
    static void into_run(const HeadLayout& l, const Act* k, const Act* v, uint8_t* run, int token) {
        if (token % kTile == 0) clear_tile(l, run, token);
        const uint16_t k_scale = scale_of(k, l.k_dim), v_scale = scale_of(v, l.v_dim);
        if constexpr (Store::kScaled) {
            __builtin_memcpy(run + k_scales_at(l, token), &k_scale, 2);
            __builtin_memcpy(run + v_scales_at(l, token), &v_scale, 2);
        }
        alignas(64) uint8_t row[kStretch * sizeof(float)] = {};
        stretches(l.v_dim, [&](int first, int last) {
            convert(v, first, last, inverse(v_scale), row, 0);
            place_v(l, row, first, last, run, token);
        });
        __builtin_memset(row, 0, sizeof row);  // no infinities where K is padded
        stretches(l.k_dim, [&](int first, int last) {
            convert(k, first, last, inverse(k_scale), row, 0);
            place_k(l, row, first, last, run, token);
        });
    }

    // Clears a tile. A recycled block may hold infinities, which a weight of zero would turn into NaN.
    static void clear_tile(const HeadLayout& l, uint8_t* run, int token) {
        for (int d = 0; d < l.v_pad; d += kTile)
            for (int t = 0; t < kTile; t += Store::kSteps)
                __builtin_memset(run + v_unit_at<Store>(l, token + t, d), 0, Store::kUnitBytes);
        if constexpr (Store::kScaled) __builtin_memset(run + v_scales_at(l, token), 0, kTile * 2);
    }

    template <class Act>
    static void into_row(const HeadLayout& l, const Act* k, const Act* v, uint8_t* row) {
        const uint16_t scales[2] = {scale_of(k, l.k_dim), scale_of(v, l.v_dim)};
        if constexpr (Store::kScaled) __builtin_memcpy(row + l.row_bytes - sizeof scales, scales, sizeof scales);
        stretches(l.k_dim, [&](int first, int last) { convert(k, first, last, inverse(scales[0]), row, first); });
        stretches(l.v_dim,
                  [&](int first, int last) { convert(v, first, last, inverse(scales[1]), row + l.k_row, first); });
    }

    template <class Act>
    static void rows_of(const AppendArgs& a) {
        const HeadLayout& l = *a.kv.layout;
        for (int64_t i = 0; i < a.count; ++i) {
            const Act *k = static_cast<const Act*>(a.k) + i * a.stride,
                      *v = static_cast<const Act*>(a.v) + i * a.stride;
            const int64_t position = a.position + i;
            const int token = static_cast<int>(position % l.block_tokens);
            uint8_t* block = a.kv.base + a.kv.blocks[position / l.block_tokens] * a.kv.block_bytes;
            if (l.by_rows) {
                into_row(l, k, v, block + token * l.row_bytes);
            } else {
                into_run(l, k, v, block + token / l.run_tokens * l.run_bytes, token % l.run_tokens);
            }
        }
    }

    static void run(const AppendArgs& a) { a.type == ActType::kF32 ? rows_of<float>(a) : rows_of<uint16_t>(a); }

    // Gathers positions [begin, end) of one chunk, stored as rows, into a run of 64.
    static void gather(const HeadView& kv, int64_t begin, int64_t end, uint8_t* run) {
        const HeadLayout& l = *kv.layout;
        __builtin_memset(run, 0, l.run_bytes);
        for (int64_t p = begin; p < end; ++p) {
            const int token = static_cast<int>(p % kChunk);
            const uint8_t* row =
                kv.base + kv.blocks[p / l.block_tokens] * kv.block_bytes + p % l.block_tokens * l.row_bytes;
            place_k(l, row, 0, l.k_dim, run, token);
            place_v(l, row + l.k_row, 0, l.v_dim, run, token);
            if constexpr (Store::kScaled) {
                const uint8_t* scales = row + l.row_bytes - 4;
                __builtin_memcpy(run + k_scales_at(l, token), scales, 2);
                __builtin_memcpy(run + v_scales_at(l, token), scales + 2, 2);
            }
        }
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
