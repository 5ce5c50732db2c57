// 4 floats per vector by compiler vector extensions: SSE2 on x86-64, NEON on aarch64.
#pragma once
#include "target.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

constexpr int W = 4;
constexpr int kMaxRows = 2;
constexpr int kAccs = 8;
constexpr int kWideTurn = 1;
typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));

inline F vload(const float* p) {
    F a;
    __builtin_memcpy(&a, p, sizeof a);
    return a;
}
inline void vstore(float* p, F a) { __builtin_memcpy(p, &a, sizeof a); }
inline F vset(float x) { return F{x, x, x, x}; }
inline F vzero() { return vset(0.0f); }
inline F vfma(F a, F b, F c) { return a * b + c; }
inline F vmul(F a, F b) { return a * b; }
inline F vadd(F a, F b) { return a + b; }
inline F vsub(F a, F b) { return a - b; }
inline F vdiv(F a, F b) { return a / b; }
inline F vmax(F a, F b) { return a > b ? a : b; }
inline bool any_greater(F a, float b) {
    const I m = a > vset(b);
    return (m[0] | m[1] | m[2] | m[3]) != 0;
}

inline float hmax(F a) {
    const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
    return x > y ? x : y;
}
inline float hsum(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }

inline U load_u16(const uint16_t* p) { return U{p[0], p[1], p[2], p[3]}; }

// Half to float by scaling the exponent; subnormals come out exact, infinities and NaNs are restored.
inline F load_f16(const uint16_t* p) {
    const U h = load_u16(p), magnitude = (h & 0x7fff) << 13;
    const F scaled = reinterpret_cast<F>(magnitude) * vset(0x1p112f);
    const U special = reinterpret_cast<U>(magnitude >= (0x7c00u << 13)) & 0x7f800000u;
    return reinterpret_cast<F>(reinterpret_cast<U>(scaled) | special | ((h & 0x8000) << 16));
}

inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
    U x;
    __builtin_memcpy(&x, p, sizeof x);
    even = reinterpret_cast<F>(x << 16);
    odd = reinterpret_cast<F>(x & 0xffff0000u);
}

inline F load_bf16(const uint16_t* p) { return reinterpret_cast<F>(load_u16(p) << 16); }

inline void load_i8_pairs(const uint8_t* p, int pair, F& even, F& odd) {
    for (int i = 0; i < W; ++i) {
        even[i] = static_cast<float>(static_cast<int8_t>(p[4 * i + 2 * pair]));
        odd[i] = static_cast<float>(static_cast<int8_t>(p[4 * i + 2 * pair + 1]));
    }
}

inline void load_i4_pairs(const uint8_t* p, int bit, F& low, F& high) {
    I x;
    __builtin_memcpy(&x, p, sizeof x);
    low = __builtin_convertvector(((x >> bit) & 15) - 8, F);
    high = __builtin_convertvector(((x >> (bit + 8)) & 15) - 8, F);
}

// Codes 0..63 stand for -32..31: their low bits begin at `bit` and bit + 8, their high bits at `at` and at + 8.
inline void load_i6_pairs(const uint8_t* p, int bit, const uint8_t* high_bits, int at, F& low, F& high) {
    U x, y;
    __builtin_memcpy(&x, p, sizeof x);
    __builtin_memcpy(&y, high_bits, sizeof y);
    const auto code = [&](int byte) {
        const U all = ((x >> (bit + byte)) & 15) | ((y >> (at + byte)) & 3) << 4;
        return __builtin_convertvector(reinterpret_cast<I>(all) - 32, F);
    };
    low = code(0);
    high = code(8);
}

inline F keep_lanes(F a, int lo, int hi) {
    const I lane = {0, 1, 2, 3};
    const I keep = (lane >= lo) & (lane < hi);
    return keep ? a : vset(-__builtin_inff());
}

// floor(t) for t < 2^22, -126 at least, by rounding in the adder and taking off one where that went up.
inline F vfloor(F t) {
    const F magic = vset(12582912.0f), c = vmax(vset(-126.0f), t), n = (c + magic) - magic;
    const I up = n > c;
    return up ? n - 1.0f : n;
}
inline F fraction(F t) { return vmax(vset(-126.0f), t) - vfloor(t); }

// p * 2^floor(t); zero where t < -126.
inline F times_exp2(F p, F t) {
    const U power = reinterpret_cast<U>(__builtin_convertvector(vfloor(t), I) + 127) << 23;
    const I drop = t < vset(-126.0f);
    return drop ? vzero() : p * reinterpret_cast<F>(power);
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
