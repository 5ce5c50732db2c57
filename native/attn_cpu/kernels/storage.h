// The layout of every KV type in a tile, and its conversion to float vectors.
//
// A unit is kSteps steps of 16 lanes. Of K: lane = token, step = dim; of V: lane = dim, step = token.
// float32, float16: [2 steps][16 lanes]. bfloat16: [16 lanes][2 steps], int8: [16 lanes][4 steps], the operand
// orders of pair and of quad products. int4: [16 lanes][4] bytes, steps 0 to 3 in the low halves, 4 to 7 in the high
// ones, code + 8. int6: two units of int4 with the low bits of code + 32, then [16 lanes][4] bytes of high bits: those
// of step s are from bit s / 4 * 2 of byte s % 4 on. They hold code * scale + middle, for each token, head and K or V.
//
// In a run: K units [tile / kTurn][dim / kSteps][tile % kTurn], V units [dim / 16 / kTurn][token / kSteps][dim / 16 %
// kTurn]; kTurn units lie side by side because one pass of a kernel reads them together.
#pragma once
#include "math.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

template <class Self, class Elem>
struct WholeStore {
    static constexpr bool kScaled = false, kMiddle = false;
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
    // The way back: of `move`, and of `place`.
    static inline void fetch(const uint8_t* unit, int lane, int step, uint8_t* row, int d) {
        reinterpret_cast<Elem*>(row)[d] = reinterpret_cast<const Elem*>(unit)[Self::offset(lane, step)];
    }
    static inline void take(const uint8_t* unit, int lane, uint8_t* row, int d) {
        for (int step = 0; step < kSteps; ++step) fetch(unit, lane, step, row, d + step);
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

// Returns the whole number in [low, high] that is nearest to x.
inline int code_of(float x, int low, int high) {
    const float bottom = static_cast<float>(low), top = static_cast<float>(high);
    const float below = x > top ? top : x, c = below < bottom ? bottom : below;
    return static_cast<int>(c + __builtin_copysignf(0.5f, c));
}

struct StoreI8 : WholeStore<StoreI8, int8_t> {
    static constexpr bool kScaled = true, kMiddle = false;
    static constexpr int kTurn = kWideTurn;
    static constexpr int kLow = -127, kHigh = 127;
    static constexpr int offset(int lane, int step) { return lane * 4 + step; }
    static int8_t encode(float x) { return static_cast<int8_t>(code_of(x, kLow, kHigh)); }
    static inline void load(const uint8_t* unit, int j, int pair, F& a, F& b) {
        load_i8_pairs(unit + j * W * 4, pair, a, b);
    }
};

struct StoreI4 {
    static constexpr bool kScaled = true, kMiddle = true;
    static constexpr int kTurn = kWideTurn;
    static constexpr int kLow = -8, kHigh = 7;
    static constexpr int kSteps = 8;
    static constexpr int kUnitBytes = kSteps * kTile / 2;
    static void put_half(uint8_t& byte, int step, int code) {
        byte = static_cast<uint8_t>(step == 0 ? (byte & 0xf0) | code : (byte & 0x0f) | code << 4);
    }
    static inline int code(float x) { return code_of(x, kLow, kHigh) - kLow; }
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
    static inline void fetch(const uint8_t* unit, int lane, int step, uint8_t* row, int d) {
        put_half(row[d / 2], d % 2, unit[lane * 4 + step % 4] >> (step / 4 * 4) & 15);
    }
    static inline void take(const uint8_t* unit, int lane, uint8_t* row, int d) {
        uint8_t* pairs = row + d / 2;
        for (int i = 0; i < 2; ++i) {
            const uint8_t a = unit[lane * 4 + 2 * i], b = unit[lane * 4 + 2 * i + 1];
            pairs[i] = static_cast<uint8_t>((a & 0x0f) | b << 4);
            pairs[i + 2] = static_cast<uint8_t>(a >> 4 | (b & 0xf0));
        }
    }
    static inline void load(const uint8_t* unit, int j, int pair, F& a, F& b) {
        load_i4_pairs(unit + j * W * 4, pair % 2 * 16 + pair / 2 * 4, a, b);
    }
};

// For K alone. 16 dims of a row are 8 bytes of low bits, as int4 has them, and one lane's word of high bits.
struct StoreI6 {
    static constexpr bool kScaled = true, kMiddle = true;
    static constexpr int kTurn = kWideTurn;
    static constexpr int kLow = -32, kHigh = 31;
    static constexpr int kSteps = 16;
    static constexpr int kLowBytes = 2 * StoreI4::kUnitBytes;  // of a unit
    static constexpr int kUnitBytes = kLowBytes + 4 * kTile;
    static constexpr int kRowBytes = 12;
    static inline int high_at(int step) { return step % 4 * 8 + step / 4 * 2; }
    // d is a multiple of 16. Elements to the next multiple of 16 become some code.
    static inline void put(uint8_t* row, int d, const float* x, int n) {
        row += d / kSteps * kRowBytes;
        for (int first = 0; first < n; first += kSteps, row += kRowBytes) {
            const int count = n - first < kSteps ? n - first : kSteps;
            uint32_t high = 0;
            int code[kSteps] = {};
            for (int i = 0; i < count; ++i) code[i] = code_of(x[first + i], kLow, kHigh) - kLow;
            for (int i = 0; i < kSteps; ++i) high |= static_cast<uint32_t>(code[i] >> 4) << high_at(i);
            for (int i = 0; i < kSteps; i += 2)
                row[i / 2] = static_cast<uint8_t>((code[i] & 15) | (code[i + 1] & 15) << 4);
            __builtin_memcpy(row + kSteps / 2, &high, 4);
        }
    }
    static inline void place(const uint8_t* row, int d, uint8_t* unit, int lane) {
        row += d / kSteps * kRowBytes;
        for (int i = 0; i < 2; ++i) StoreI4::place(row, 8 * i, unit + i * StoreI4::kUnitBytes, lane);
        __builtin_memcpy(unit + kLowBytes + lane * 4, row + kSteps / 2, 4);
    }
    static inline void take(const uint8_t* unit, int lane, uint8_t* row, int d) {
        row += d / kSteps * kRowBytes;
        for (int i = 0; i < 2; ++i) StoreI4::take(unit + i * StoreI4::kUnitBytes, lane, row, 8 * i);
        __builtin_memcpy(row + kSteps / 2, unit + kLowBytes + lane * 4, 4);
    }
    static inline void load(const uint8_t* unit, int j, int pair, F& a, F& b) {
        const int byte = pair % 2 * 16;
        load_i6_pairs(unit + pair / 4 * StoreI4::kUnitBytes + j * W * 4, byte + pair % 4 / 2 * 4,
                      unit + kLowBytes + j * W * 4, byte + pair / 2 * 2, a, b);
    }
};

// What K and what V are kept as. kFine: Byte products take queries and weights as whole numbers of two bytes. One byte
// adds less error than V of four bits has.
template <class KStore, class VStore = KStore>
struct KvStore {
    using K = KStore;
    using V = VStore;
    static constexpr bool kScaled = K::kScaled;
    static constexpr bool kFine = !V::kMiddle;
};

// Tiles of a run whose K units take turns.
template <class K>
inline int k_turn(const HeadLayout& l) {
    return l.run_tokens == kTile ? 1 : K::kTurn;
}

// Offsets in a run.
template <class K>
inline size_t k_unit_at(const HeadLayout& l, int token, int dim) {
    const int turn = k_turn<K>(l), tile = token / kTile, units = l.k_pad / K::kSteps;
    return static_cast<size_t>((tile / turn * units + dim / K::kSteps) * turn + tile % turn) * K::kUnitBytes;
}
template <class V>
inline size_t v_unit_at(const HeadLayout& l, int token, int dim) {
    const int column = dim / kTile, side = column % V::kTurn, first = column - side, left = l.v_pad / kTile - first,
              turn = left < V::kTurn ? left : V::kTurn;
    const int units = first * (l.run_tokens / V::kSteps) + token / V::kSteps * turn + side;
    return l.v_units + static_cast<size_t>(units) * V::kUnitBytes;
}
// The i-th scale of a token: those of K come first, then those of V.
inline size_t scale_at(const HeadLayout& l, int i, int token) {
    return l.scales + static_cast<size_t>(i * l.run_tokens + token) * 2;
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
