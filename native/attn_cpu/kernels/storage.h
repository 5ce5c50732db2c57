// The layout of every KV type in a tile, and its conversion to float vectors.
//
// A unit is kSteps steps of 16 lanes. Of K: lane = token, step = dim; of V: lane = dim, step = token.
// float32, float16: [2 steps][16 lanes]. bfloat16: [16 lanes][2 steps], int8: [16 lanes][4 steps], the operand
// orders of pair and of quad products. int4: [16 lanes][4] bytes, steps 0 to 3 in the low halves, 4 to 7 in the high
// ones, code + 8. int8 and int4 hold code * scale, one scale per token, head and K or V.
//
// In a run: K units [tile / kTurn][dim / kSteps][tile % kTurn], V units [dim / 16 / kTurn][token / kSteps][dim / 16 %
// kTurn]; kTurn units lie side by side because one pass of a kernel reads them together.
#pragma once
#include "math.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

template <class Self, class Elem>
struct WholeStore {
    static constexpr bool kScaled = false;
    static constexpr int kTurn = kWideTurn;
    static constexpr int kSteps = sizeof(Elem) == 1 ? 4 : 2;
    static constexpr int kUnitBytes = kSteps * kTile * sizeof(Elem);
    // Elements d to d + n of a row.
    static inline void put(uint8_t* row, int d, const float* x, int n) {
        for (int i = 0; i < n; ++i) reinterpret_cast<Elem*>(row)[d + i] = Self::encode(x[i]);
    }
    static inline void move(const uint8_t* row, int d, uint8_t* unit, int lane, int step) {
        reinterpret_cast<Elem*>(unit)[Self::offset(lane, step)] = reinterpret_cast<const Elem*>(row)[d];
    }
    // Elements d to d + kSteps, one a step.
    static inline void place(const uint8_t* row, int d, uint8_t* unit, int lane) {
        if constexpr (Self::offset(0, 1) == 1) {
            __builtin_memcpy(reinterpret_cast<Elem*>(unit) + Self::offset(lane, 0),
                             reinterpret_cast<const Elem*>(row) + d, kSteps * sizeof(Elem));
        } else {
            for (int step = 0; step < kSteps; ++step) move(row, d + step, unit, lane, step);
        }
    }
};

struct StoreF32 : WholeStore<StoreF32, float> {
    static constexpr int offset(int lane, int step) { return step * kTile + lane; }
    static float encode(float x) { return x; }
    static inline void load(const uint8_t* unit, int j, int, F& a, F& b) {
        const float* p = reinterpret_cast<const float*>(unit) + j * W;
        a = vload(p);
        b = vload(p + kTile);
    }
};

struct StoreF16 : WholeStore<StoreF16, uint16_t> {
    static constexpr int offset(int lane, int step) { return step * kTile + lane; }
    static uint16_t encode(float x) { return f16_of(x); }
    static inline void load(const uint8_t* unit, int j, int, F& a, F& b) {
        const uint16_t* p = reinterpret_cast<const uint16_t*>(unit) + j * W;
        a = load_f16(p);
        b = load_f16(p + kTile);
    }
};

struct StoreBF16 : WholeStore<StoreBF16, uint16_t> {
    static constexpr int offset(int lane, int step) { return lane * 2 + step; }
    static uint16_t encode(float x) { return bf16_of(x); }
    static inline void load(const uint8_t* unit, int j, int, F& a, F& b) {
        load_bf16_pairs(reinterpret_cast<const uint16_t*>(unit) + j * W * 2, a, b);
    }
};

inline int code_of(float x, int levels) {
    const float top = static_cast<float>(levels), below = x > top ? top : x, c = below < -top ? -top : below;
    return static_cast<int>(c + __builtin_copysignf(0.5f, c));
}

struct StoreI8 : WholeStore<StoreI8, int8_t> {
    static constexpr bool kScaled = true;
    static constexpr int kTurn = 1;
    static constexpr int kLevels = 127;
    static constexpr int offset(int lane, int step) { return lane * 4 + step; }
    static int8_t encode(float x) { return static_cast<int8_t>(code_of(x, kLevels)); }
    static inline void load(const uint8_t* unit, int j, int pair, F& a, F& b) {
        load_i8_pairs(unit + j * W * 4, pair, a, b);
    }
};

struct StoreI4 {
    static constexpr bool kScaled = true;
    static constexpr int kTurn = 1;
    static constexpr int kLevels = 7;
    static constexpr int kSteps = 8;
    static constexpr int kUnitBytes = kSteps * kTile / 2;
    static void put_half(uint8_t& byte, int step, int code) {
        byte = static_cast<uint8_t>(step == 0 ? (byte & 0xf0) | code : (byte & 0x0f) | code << 4);
    }
    static inline int code(float x) { return code_of(x, kLevels) + 8; }
    // d is even.
    static inline void put(uint8_t* row, int d, const float* x, int n) {
        for (int i = 0; i + 2 <= n; i += 2) row[(d + i) / 2] = static_cast<uint8_t>(code(x[i]) | code(x[i + 1]) << 4);
        if (n % 2 == 1) put_half(row[(d + n) / 2], 0, code(x[n - 1]));
    }
    static inline void move(const uint8_t* row, int d, uint8_t* unit, int lane, int step) {
        put_half(unit[lane * 4 + step % 4], step / 4, row[d / 2] >> (d % 2 * 4) & 15);
    }
    static inline void place(const uint8_t* row, int d, uint8_t* unit, int lane) {
        const uint8_t* pairs = row + d / 2;
        for (int i = 0; i < 2; ++i) {
            unit[lane * 4 + 2 * i] = static_cast<uint8_t>((pairs[i] & 0x0f) | pairs[i + 2] << 4);
            unit[lane * 4 + 2 * i + 1] = static_cast<uint8_t>(pairs[i] >> 4 | (pairs[i + 2] & 0xf0));
        }
    }
    static inline void load(const uint8_t* unit, int j, int pair, F& a, F& b) {
        load_i4_pairs(unit + j * W * 4, pair % 2 * 16 + pair / 2 * 4, a, b);
    }
};

// Tiles of a run whose K units take turns.
template <class Store>
inline int k_turn(const HeadLayout& l) {
    return l.run_tokens == kTile ? 1 : Store::kTurn;
}

// Offsets in a run.
template <class Store>
inline size_t k_unit_at(const HeadLayout& l, int token, int dim) {
    const int turn = k_turn<Store>(l), tile = token / kTile, units = l.k_pad / Store::kSteps;
    return static_cast<size_t>((tile / turn * units + dim / Store::kSteps) * turn + tile % turn) * Store::kUnitBytes;
}
template <class Store>
inline size_t v_unit_at(const HeadLayout& l, int token, int dim) {
    const int column = dim / kTile, side = column % Store::kTurn, first = column - side, left = l.v_pad / kTile - first,
              turn = left < Store::kTurn ? left : Store::kTurn;
    const int units = first * (l.run_tokens / Store::kSteps) + token / Store::kSteps * turn + side;
    return l.v_units + static_cast<size_t>(units) * Store::kUnitBytes;
}
inline size_t k_scales_at(const HeadLayout& l, int token) { return l.scales + static_cast<size_t>(token) * 2; }
inline size_t v_scales_at(const HeadLayout& l, int token) { return k_scales_at(l, l.run_tokens + token); }

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
