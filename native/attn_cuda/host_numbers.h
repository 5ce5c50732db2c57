// The device's conversions of numbers, on a host.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace hpcdecode {

inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t as_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline uint16_t bf16_of(float x) {
    const uint32_t b = as_bits(x);
    if ((b & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((b >> 16) | 0x40);
    return static_cast<uint16_t>((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
// Returns the differences of two pairs of bfloat16 numbers.
inline uint32_t minus_bf16(uint32_t a, uint32_t b) {
    const auto half = [](uint32_t x, uint32_t y) { return uint32_t{bf16_of(as_float(x) - as_float(y))}; };
    return half(a << 16, b << 16) | half(a & 0xffff0000u, b & 0xffff0000u) << 16;
}
inline uint16_t f16_of(float x) {
    const uint32_t b = as_bits(x), size = b & 0x7fffffffu, sign = b >> 16 & 0x8000u;
    if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (size == 0) return static_cast<uint16_t>(sign);
    if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    // Below 2^-14 units are 2^-24, else 2^-10 of the power of two; lrint rounds to nearest even.
    int exponent;
    std::frexp(as_float(size), &exponent);
    const int unit = exponent < -13 ? -24 : exponent - 11;
    const int64_t units = std::lrint(std::ldexp(as_float(size), -unit));
    return static_cast<uint16_t>(sign | (units + (static_cast<int64_t>(unit + 24) << 10)));
}
inline float float_of_f16(uint16_t h) {
    const int exponent = h >> 10 & 31, digits = h & 1023;
    const float size = exponent == 31  ? (digits ? NAN : INFINITY)
                       : exponent == 0 ? std::ldexp(static_cast<float>(digits), -24)
                                       : std::ldexp(static_cast<float>(digits + 1024), exponent - 25);
    return h & 0x8000 ? -size : size;
}
inline uint32_t two_bf16(float x, float y) { return bf16_of(x) | static_cast<uint32_t>(bf16_of(y)) << 16; }
inline uint32_t two_f16(float x, float y) { return f16_of(x) | static_cast<uint32_t>(f16_of(y)) << 16; }
inline uint32_t in_register(uint32_t bits) { return bits; }
inline uint32_t bytes_apart(uint32_t two) { return (two & 255u) | (two & 0xff00u) << 8; }
inline float power_of_2(float x) { return std::exp2(x); }
inline float infinity() { return INFINITY; }

}  // namespace hpcdecode
