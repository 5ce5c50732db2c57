// Converts new rows of K and V and writes them into the KV cache.
#pragma once
#include "numbers.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

// Dims of K that have scales of their own.
struct Dims {
    int first, last, rotation;
};

inline Dims whole_or_first(const HeadLayout& l) { return {0, l.k_split > 0 ? l.k_split : l.k_dim, l.k_rotation}; }
inline Dims rest(const HeadLayout& l) { return {l.k_split, l.k_dim, l.split_rotation}; }

template <class Store>
struct Append {
    using K = typename Store::K;
    using V = typename Store::V;

    // Copy dims [first, last) of a token's K or V from a row, which begins with dim `first`, to their place in a run.
    static inline void place_k(const HeadLayout& l, const uint8_t* row, int first, int last, uint8_t* run, int token) {
        uint8_t* unit = run + k_unit_at<K>(l, token, first);
        const size_t step = static_cast<size_t>(k_turn<K>(l)) * K::kUnitBytes;
        for (int d = 0; d < last - first; d += K::kSteps, unit += step) K::place(row, d, unit, token % kTile);
    }
    static inline void place_v(const HeadLayout& l, const uint8_t* row, int first, int last, uint8_t* run, int token) {
        for (int d = first; d < last; d += kTile) {
            uint8_t* unit = run + v_unit_at<V>(l, token, d);
            for (int lane = 0; lane < kTile; ++lane) V::move(row, d - first + lane, unit, lane, token % V::kSteps);
        }
    }
    // Writes `count` scales of a token, from the i-th on.
    static inline void place_scales(const HeadLayout& l, const uint16_t* scales, int i, int count, uint8_t* run,
                                    int token) {
        for (const int end = i + count; i < end; ++i, ++scales)
            __builtin_memcpy(run + scale_at(l, i, token), scales, 2);
    }

    // Writes dims of K of one token, which have scales of their own, to their place in a run.
    // scale: Number of the first of the scales.
    template <class Act>
    static void keys_into_run(const HeadLayout& l, const Act* k, Dims dims, int scale, uint8_t* run, int token) {
        Numbers<K, Act> keys(k + dims.first, dims.last - dims.first, dims.rotation);
        keys.stretches([&](int first, int last, const uint8_t* row) {
            place_k(l, row, dims.first + first, dims.first + last, run, token);
        });
        place_scales(l, keys.scales(), scale, keys.kScales, run, token);
    }

    // Writes K and V of one token to their place in a run.
    template <class Act>
    static void into_run(const HeadLayout& l, const Act* k, const Act* v, uint8_t* run, int token) {
        if (token % kTile == 0) clear_tile(l, run, token);
        keys_into_run(l, k, whole_or_first(l), 0, run, token);
        if (l.k_split > 0) keys_into_run(l, k, rest(l), 1, run, token);
        if (l.latent) return;
        Numbers<V, Act> values(v, l.v_dim, l.v_rotation);
        values.stretches([&](int first, int last, const uint8_t* row) { place_v(l, row, first, last, run, token); });
        place_scales(l, values.scales(), l.k_scales, values.kScales, run, token);
    }

    // Clears a tile. A recycled block may hold infinities, which a weight of zero would turn into NaN.
    static void clear_tile(const HeadLayout& l, uint8_t* run, int token) {
        if (l.latent) return clear_keys(l, run, token);
        for (int d = 0; d < l.v_pad; d += kTile)
            for (int t = 0; t < kTile; t += V::kSteps)
                __builtin_memset(run + v_unit_at<V>(l, token + t, d), 0, V::kUnitBytes);
        for (int i = l.k_scales; i < l.k_scales + l.v_scales; ++i)
            __builtin_memset(run + scale_at(l, i, token), 0, kTile * 2);
    }

    static void clear_keys(const HeadLayout& l, uint8_t* run, int token) {
        for (int d = 0; d < l.k_pad; d += K::kSteps)
            __builtin_memset(run + k_unit_at<K>(l, token, d), 0, K::kUnitBytes);
        for (int i = 0; i < l.k_scales; ++i) __builtin_memset(run + scale_at(l, i, token), 0, kTile * 2);
    }

    // Writes dims of K of one token to a row, and their scales.
    template <class Act>
    static void keys_into_row(const HeadLayout& l, const Act* k, Dims dims, uint8_t* row, uint8_t* scales) {
        Numbers<K, Act> keys(k + dims.first, dims.last - dims.first, dims.rotation);
        keys.store(row + l.k_row * dims.first / l.k_pad);
        __builtin_memcpy(scales, keys.scales(), 2 * keys.kScales);
    }

    template <class Act>
    static void into_row(const HeadLayout& l, const Act* k, const Act* v, uint8_t* row) {
        uint8_t* scales = row + l.row_bytes - 2 * (l.k_scales + l.v_scales);
        keys_into_row(l, k, whole_or_first(l), row, scales);
        if (l.k_split > 0) keys_into_row(l, k, rest(l), row, scales + 2);
        if (l.latent) return;
        Numbers<V, Act> values(v, l.v_dim, l.v_rotation);
        values.store(row + l.k_row);
        __builtin_memcpy(scales + 2 * l.k_scales, values.scales(), 2 * values.kScales);
    }

    static inline const uint8_t* row_at(const HeadView& kv, int64_t p) {
        const HeadLayout& l = *kv.layout;
        return kv.base + kv.blocks[p / l.block_tokens] * kv.block_bytes + p % l.block_tokens * l.row_bytes;
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

    static inline void scales_into_run(const HeadLayout& l, const uint8_t* row, uint8_t* run, int token) {
        const int count = l.k_scales + l.v_scales;
        uint16_t scales[4];
        __builtin_memcpy(scales, row + l.row_bytes - 2 * count, 2 * count);
        place_scales(l, scales, 0, count, run, token);
    }

    // Copies a token that is stored as a row to its place in a run.
    static inline void row_into_run(const HeadLayout& l, const uint8_t* row, uint8_t* run, int token) {
        place_k(l, row, 0, l.k_dim, run, token);
        if (!l.latent) place_v(l, row + l.k_row, 0, l.v_dim, run, token);
        scales_into_run(l, row, run, token);
    }

    // Copies a token from its place in a run to a row.
    static inline void run_into_row(const HeadLayout& l, const uint8_t* run, int token, uint8_t* row) {
        const uint8_t* unit = run + k_unit_at<K>(l, token, 0);
        const size_t step = static_cast<size_t>(k_turn<K>(l)) * K::kUnitBytes;
        for (int d = 0; d < l.k_dim; d += K::kSteps, unit += step) K::take(unit, token % kTile, row, d);
        for (int d = 0; d < (l.latent ? 0 : l.v_dim); d += kTile) {
            const uint8_t* values = run + v_unit_at<V>(l, token, d);
            for (int lane = 0; lane < kTile; ++lane) V::fetch(values, lane, token % V::kSteps, row + l.k_row, d + lane);
        }
        const int count = l.k_scales + l.v_scales;
        for (int i = 0; i < count; ++i)
            __builtin_memcpy(row + l.row_bytes - 2 * (count - i), run + scale_at(l, i, token), 2);
    }

    static void save(const TokenArgs& a) {
        const HeadLayout& l = *a.layout;
        uint8_t* row = a.rows;
        for (int token = a.first; token < a.first + a.count; ++token, row += a.stride) {
            if (l.by_rows) {
                __builtin_memcpy(row, a.block + token * l.row_bytes, l.row_bytes);
            } else {
                run_into_row(l, a.block + token / l.run_tokens * l.run_bytes, token % l.run_tokens, row);
            }
        }
    }

    static void restore(const TokenArgs& a) {
        const HeadLayout& l = *a.layout;
        const uint8_t* row = a.rows;
        for (int token = a.first; token < a.first + a.count; ++token, row += a.stride) {
            if (l.by_rows) {
                __builtin_memcpy(a.block + token * l.row_bytes, row, l.row_bytes);
                continue;
            }
            uint8_t* run = a.block + token / l.run_tokens * l.run_bytes;
            if (token % kTile == 0) clear_tile(l, run, token % l.run_tokens);
            row_into_run(l, row, run, token % l.run_tokens);
        }
    }
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
