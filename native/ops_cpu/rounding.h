// Numbers rounded to bfloat16, float16 and FP8, as weights are before panels hold them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fused_kernel.h"

namespace hpcdecode::ops {

template <class To, class From>
To bits(From x) {
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

inline float rounded_to(Type type, float x) {
    if (type == Type::f32) return x;
    const auto u = bits<uint32_t>(x);
    return bits<float>((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}

// Returns the nearest float16 of 0 <= |x| <= 65504, ties to even.
inline uint16_t to_half(float x) {
    const float a = std::fabs(x);
    const uint32_t sign = x < 0 ? 0x8000u : 0;
    if (a < 0x1p-14f) return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(a * 0x1p24f)));
    const auto u = bits<uint32_t>(a);
    return static_cast<uint16_t>(sign | (((u + 0xfffu + ((u >> 13) & 1u)) >> 13) - (112u << 10)));
}

inline float from_half(uint16_t x) {
    const float magnitude = bits<float>((x & 0x7fffu) << 13) * 0x1p112f;
    return (x & 0x8000u) != 0 ? -magnitude : magnitude;
}

// Returns the nearest FP4 number (E2M1), a number between two to the smaller one.
inline uint8_t to_fp4(float x) {
    const float a = std::fabs(x);
    const int code = (a > 0.25f) + (a > 0.75f) + (a > 1.25f) + (a > 1.75f) + (a > 2.5f) + (a > 3.5f) + (a > 5);
    return static_cast<uint8_t>(code | (x < 0 ? 8 : 0));
}

// Returns the nearest FP8 number (E4M3) of |x| <= 448, ties to even.
inline uint8_t to_fp8(float x) {
    const float a = std::fabs(x);
    const uint32_t sign = x < 0 ? 0x80u : 0;
    if (a < 0x1p-6f) return static_cast<uint8_t>(sign | static_cast<uint32_t>(std::nearbyint(a * 0x1p9f)));
    const auto u = bits<uint32_t>(a);
    return static_cast<uint8_t>(sign | (((u + 0x7ffffu + ((u >> 20) & 1u)) >> 20) - (120u << 3)));
}

inline float from_fp8(uint8_t x) {
    const float magnitude = bits<float>((x & 0x7fu) << 20) * 0x1p120f;
    return (x & 0x80u) != 0 ? -magnitude : magnitude;
}

}  // namespace hpcdecode::ops
