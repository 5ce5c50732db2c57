// Elementary functions as plain arithmetic, so that the compiler vectorises the loops around them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "target.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

template <class To, class From>
inline To bits(From x) {
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

// Returns the nearest bfloat16 as float32, ties to even. NaN of a bfloat16 or of arithmetic stays NaN, because its low
// half is zero.
inline float round_bf16(float x) {
    const uint32_t u = bits<uint32_t>(x);
    return bits<float>((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}

inline float from_bf16(uint16_t x) { return bits<float>(static_cast<uint32_t>(x) << 16); }

// Rounds |x| < 2^22 to the nearest integer, ties to even: 1.5 * 2^23 leaves no bits behind the point.
inline float rounded(float x) { return (x + 12582912.0f) - 12582912.0f; }

// Cephes' expf: x = n ln 2 + r, a polynomial in r. Returns exp(r) and sets n; 2 ulp.
inline float exp_of_rest(float x, float& n) {
    n = rounded(x * 1.44269504088896341f);
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r) * r + r + 1.0f;
}

// 0 below -86.6.
inline float exp_f(float x) {
    const float clamped = x < -86.6f ? -86.6f : (x > 88.7f ? 88.7f : x);
    float n;
    const float y = exp_of_rest(clamped, n);
    // n may be 128, one more than an exponent holds, so 2^(n-1) twice.
    const float scaled = y * bits<float>((static_cast<int32_t>(n) + 126) << 23) * 2.0f;
    const float low = x < -86.6f ? 0.0f : scaled;
    const float high = x > 88.7f ? HUGE_VALF : low;
    return x != x ? x : high;
}

// Of 1 to 2^125, 1 ulp: a first guess from the bits, then Newton's steps; vector units divide far slower.
inline float reciprocal_of(float x) {
    float r = bits<float>(0x7ef311c7u - bits<uint32_t>(x));
    r = r * (2.0f - x * r);
    r = r * (2.0f - x * r);
    return r * (2.0f - x * r);
}

// 4e-38 where it is less.
inline float sigmoid_f(float x) {
    const float clamped = x < -86.0f ? -86.0f : (x > 86.0f ? 86.0f : x);
    float n;
    const float y = exp_of_rest(-clamped, n);
    return reciprocal_of(1.0f + y * bits<float>((static_cast<int32_t>(n) + 127) << 23));
}

// 0 within 1e-35 below -100.
inline float silu_f(float x) {
    const float clamped = x < -100.0f ? -100.0f : x;
    return clamped * sigmoid_f(clamped);
}

// log(1 + exp(x)), 2 ulp: max(x, 0) and log(1 + e) of e = exp(-|x|), by the series of 2 atanh(e / (2 + e)).
inline float softplus_f(float x) {
    const float e = exp_f(-std::fabs(x)), s = e * reciprocal_of(2.0f + e), t = s * s;
    float p = 1.0f / 15;
    p = p * t + 1.0f / 13;
    p = p * t + 1.0f / 11;
    p = p * t + 1.0f / 9;
    p = p * t + 1.0f / 7;
    p = p * t + 1.0f / 5;
    p = p * t + 1.0f / 3;
    const float log = 2.0f * (s + s * (t * p));
    return (x > 0 ? x : 0.0f) + log;
}

// Near 0 the series, elsewhere 1 - 2 / (exp(2x) + 1).
inline float tanh_f(float x) {
    const float a = std::fabs(x), s = x * x;
    const float large = 1.0f - 2.0f / (exp_f(2.0f * a) + 1.0f);
    const float series = ((62.0f / 2835 * s - 17.0f / 315) * s + 2.0f / 15) * s - 1.0f / 3;
    const float signed_large = x < 0 ? -large : large;
    return a < 0.3f ? x + x * s * series : signed_large;
}

// Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
inline float erf_f(float x) {
    const float a = std::fabs(x), t = 1.0f / (1.0f + 0.3275911f * a);
    const float p =
        ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    const float y = 1.0f - p * exp_f(-a * a);
    return x < 0 ? -y : y;
}

inline float gelu_f(float x) { return 0.5f * x * (1.0f + erf_f(x * 0.70710678118654752f)); }

// (1 + tanh(y)) / 2 is the sigmoid of 2 y. 0 within 1e-35 below -100.
inline float gelu_tanh_f(float x) {
    const float clamped = x < -100.0f ? -100.0f : x;
    return clamped * sigmoid_f(1.59576912160573072f * (clamped + 0.044715f * clamped * clamped * clamped));
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
