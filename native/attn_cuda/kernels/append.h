// Writes K and V of one new token and KV head, and copies blocks.
#pragma once
#include "place.h"
#include "rotate.h"

namespace hpcdecode {

// Gives all threads the largest |x| of a row. tops: Room for one of each warp.
HPC_DEVICE void largest(Block& block, const float* row, int dims, float* tops, Own<float>& top) {
    block.each([&](int t) {
        top[t] = 0.0f;
        for (int d = t; d < dims; d += kThreads) {
            const float x = row[d], size = x < 0 ? -x : x;
            top[t] = size > top[t] ? size : top[t];
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

template <class Num>
HPC_DEVICE void write_row(Block& block, const void* data, ActType type, int64_t first, int dims, int padded,
                          int rotation, uint8_t* to, uint16_t* scale) {
    using Elem = typename Num::Elem;
    if constexpr (Num::kScaled) {
        float *tops = reinterpret_cast<float*>(block.smem), *row = tops + kWarps;
        Own<float> factor;
        block.each([&](int t) {
            for (int d = t; d < dims; d += kThreads) row[d] = load_act(data, type, first + d);
        });
        rotate(block, row, dims, rotation);
        largest(block, row, dims, tops, factor);
        block.each([&](int t) {
            const uint16_t stored = bf16_of(factor[t] / Num::kLevels);
            factor[t] = float_of_bf16(stored) > 0.0f ? 1.0f / float_of_bf16(stored) : 0.0f;
            if (t == 0) *scale = stored;
            for (int d = t; d < padded; d += kThreads)
                reinterpret_cast<Elem*>(to)[d] = Num::encode(d < dims ? row[d] * factor[t] : 0.0f);
        });
        block.sync();
    } else {
        block.each([&](int t) {
            for (int d = t; d < padded; d += kThreads)
                reinterpret_cast<Elem*>(to)[d] = Num::encode(d < dims ? load_act(data, type, first + d) : 0.0f);
        });
    }
}

// Grid: token, KV head.
template <class Num>
HPC_DEVICE void append(Block& block, const AppendArgs& a) {
    const HeadLayout& h = a.layer.head;
    const SequenceArgs& s = a.batch.sequences[a.batch.sequence_of[block.x]];
    const Place place = place_of(a.batch, a.layer, s, block.y, s.length - s.count + block.x - s.first_row);
    const int64_t row = block.x * a.kv.stride, v = static_cast<int64_t>(a.layer.heads) * h.k_dim;
    uint16_t* scale = Num::kScaled ? scales(h, place) : nullptr;
    write_row<Num>(block, a.kv.data, a.kv.type, row + block.y * h.k_dim, h.k_dim, h.k_pad, h.k_rotation,
                   k_row(h, place), scale);
    write_row<Num>(block, a.kv.data, a.kv.type, row + v + block.y * h.v_dim, h.v_dim, h.v_pad, h.v_rotation,
                   v_row(h, place), Num::kScaled ? scale + 1 : nullptr);
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
