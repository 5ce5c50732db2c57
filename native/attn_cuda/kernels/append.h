// Writes K and V of one new token and KV head, and copies blocks.
#pragma once
#include "codes.h"
#include "place.h"
#include "rotate.h"

namespace hpcdecode {

// Gives all threads the largest of(x) of a row, `least` at least. tops: Room for one of each warp.
template <class Of>
HPC_DEVICE void largest(Block& block, const float* row, int dims, float* tops, float least, Of&& of, Own<float>& top) {
    block.each([&](int t) {
        top[t] = least;
        for (int d = t; d < dims; d += kThreads) {
            const float x = of(row[d]);
            top[t] = x > top[t] ? x : top[t];
        }
    });
    larger_of<kWarp>(block, top);
    block.each([&](int t) {
        if (t % kWarp == 0) tops[t / kWarp] = top[t];
    });
    block.sync();
    block.each([&](int t) {
        for (int i = 0; i < kWarps; ++i) top[t] = tops[i] > top[t] ? tops[i] : top[t];
    });
    block.sync();
}

// Gives all threads a row's scale and its middle, as floats: what they are rounded to, which native/attn_cpu/kernels/
// numbers.h has to the same bits.
template <class Row>
HPC_DEVICE void find_scales(Block& block, const float* row, int dims, float* tops, Own<float>& scale,
                            Own<float>& middle) {
    if constexpr (Row::kMiddle) {
        Own<float> low;
        const auto plus = [](float x) { return x; };
        const auto minus = [](float x) { return -x; };
        largest(block, row, dims, tops, -infinity(), plus, scale);
        largest(block, row, dims, tops, -infinity(), minus, low);
        block.each([&](int t) {
            const float least = -low[t];
            scale[t] = float_of_bf16(bf16_of((scale[t] - least) / Row::kLevels));
            middle[t] = float_of_bf16(bf16_of(least - Row::kLow * scale[t]));
        });
    } else {
        largest(block, row, dims, tops, 0.0f, [](float x) { return x < 0 ? -x : x; }, scale);
        block.each([&](int t) {
            scale[t] = float_of_bf16(bf16_of(scale[t] / Row::kLevels));
            middle[t] = 0.0f;
        });
    }
}

// Row: how it is kept. middle: null without one.
template <class Row>
HPC_DEVICE void write_row(Block& block, const void* data, ActType type, int64_t first, int dims, int padded,
                          int rotation, uint8_t* to, uint16_t* scale, uint16_t* middle = nullptr) {
    if constexpr (Row::kScaled) {
        float *tops = reinterpret_cast<float*>(block.smem), *row = tops + kWarps;
        Own<float> unit, base;
        block.each([&](int t) {
            for (int d = t; d < dims; d += kThreads) row[d] = load_act(data, type, first + d);
        });
        rotate(block, row, dims, rotation);
        find_scales<Row>(block, row, dims, tops, unit, base);
        block.each([&](int t) {
            if (t == 0) {
                *scale = bf16_of(unit[t]);
                if constexpr (Row::kMiddle) *middle = bf16_of(base[t]);
            }
            const float factor = unit[t] > 0.0f ? 1.0f / unit[t] : 0.0f;
            const auto in_units = [&](int d) { return d < dims ? (row[d] - base[t]) * factor : 0.0f; };
            for (int i = t; i < Row::bytes(padded); i += kThreads) to[i] = Row::byte(in_units, padded, i);
        });
        block.sync();
    } else {
        using Elem = typename Row::Elem;
        block.each([&](int t) {
            for (int d = t; d < padded; d += kThreads)
                reinterpret_cast<Elem*>(to)[d] = Row::encode(d < dims ? load_act(data, type, first + d) : 0.0f);
        });
    }
}

// Grid: token, KV head.
template <class Num>
HPC_DEVICE void append(Block& block, const AppendArgs& a) {
    const HeadLayout& h = a.layer.head;
    const SequenceArgs& s = a.batch.sequences[a.batch.sequence_of[block.x]];
    const int position = s.length - s.count + block.x - s.first_row;
    if (position < s.first_position) return;  // it has left the window
    const Place place = place_of(a.batch, a.layer, s, block.y, position);
    const int64_t row = block.x * a.kv.stride, v = static_cast<int64_t>(a.layer.heads) * h.k_dim;
    uint16_t *scale = Num::kScaled ? scales(h, place) : nullptr, *v_scale = Num::kScaled ? scale + 1 : nullptr;
    uint16_t *middle = Num::V::kMiddle ? middles(h, place) : nullptr, *v_middle = h.k_middle ? middle + 1 : middle;
    write_row<typename Num::K>(block, a.kv.data, a.kv.type, row + block.y * h.k_dim, h.k_dim, h.k_pad, h.k_rotation,
                               k_row(h, place), scale, middle);
    if (a.layer.latent) return;
    write_row<typename Num::V>(block, a.kv.data, a.kv.type, row + v + block.y * h.v_dim, h.v_dim, h.v_pad, h.v_rotation,
                               v_row(h, place), v_scale, v_middle);
}

// Grid: pair of blocks, layer.
HPC_DEVICE void copy_blocks(Block& block, const CopyArgs& a) {
    const int64_t offset = a.layers[block.y], bytes = a.layers[a.layer_count + block.y];
    const uint8_t* from = a.arena + offset + a.blocks[block.x * 2] * bytes;
    uint8_t* to = a.arena + offset + a.blocks[block.x * 2 + 1] * bytes;
    block.each([&](int t) {
        for (int64_t i = t * 16; i < bytes; i += kThreads * 16)
            for (int j = 0; j < 16; j += 8)
                *reinterpret_cast<uint64_t*>(to + i + j) = *reinterpret_cast<const uint64_t*>(from + i + j);
    });
}

}  // namespace hpcdecode
