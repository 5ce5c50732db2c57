// Functions of vectors that every instruction set shares.h.
#pragma once
#include "target.h"
#include HPCDECODE_VECTORS

namespace hpcdecode::HPCDECODE_ISA {
namespace {

constexpr int kVecs = kTile / W;  // vectors per tile

// 2^t for t <= 127, tiny or zero below 2^-126; relative error < 2e-7.
inline F vexp2(F t) {
    const F f = fraction(t);
    F p = vset(1.86713005e-3f);
    p = vfma(p, f, vset(9.01703071e-3f));
    p = vfma(p, f, vset(5.57999127e-2f));
    p = vfma(p, f, vset(2.40164444e-1f));
    p = vfma(p, f, vset(6.93151295e-1f));
    p = vfma(p, f, vset(1.0f));
    return times_exp2(p, t);
}

// Relative error < 1e-4: enough where the result is rounded to bfloat16.
inline F vexp2_coarse(F t) {
    const F f = fraction(t);
    F p = vset(7.70670399e-2f);
    p = vfma(p, f, vset(2.27644995e-1f));
    p = vfma(p, f, vset(6.95116758e-1f));
    p = vfma(p, f, vset(1.0f));
    return times_exp2(p, t);
}

inline float exp2_one(float t) {
    float lanes[W];
    vstore(lanes, vexp2(vset(t)));
    return lanes[0];
}

constexpr float kLog2E = 1.44269504088896341f;

// cap * tanh(s / cap), by 1 - 2 / (e^2x + 1), with x held where tanh is 1 in float.
inline F vsoftcap(F s, float cap) {
    F x = vmul(s, vset(1.0f / cap));
    x = vmax(vset(-10.0f), vsub(vzero(), vmax(vset(-10.0f), vsub(vzero(), x))));
    const F e = vexp2(vmul(x, vset(2.0f * kLog2E)));
    const F t = vsub(vset(1.0f), vdiv(vset(2.0f), vadd(e, vset(1.0f))));
    return vmul(t, vset(cap));
}

inline uint16_t bf16_of(float x) {
    uint32_t b;
    __builtin_memcpy(&b, &x, 4);
    if ((b & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((b >> 16) | 0x40);
    return static_cast<uint16_t>((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

inline float float_of_bf16(uint16_t h) {
    const uint32_t b = static_cast<uint32_t>(h) << 16;
    float x;
    __builtin_memcpy(&x, &b, 4);
    return x;
}

#ifndef HPCDECODE_VECTOR_STORE_BF16
inline void store_bf16(uint16_t* p, F a) {
    float lanes[W];
    vstore(lanes, a);
    for (int i = 0; i < W; ++i) p[i] = bf16_of(lanes[i]);
}
#endif

// Round to nearest even, by letting the float adder do the rounding of subnormals.
inline uint16_t f16_of(float x) {
    uint32_t b;
    __builtin_memcpy(&b, &x, 4);
    const uint32_t sign = (b >> 16) & 0x8000u;
    b &= 0x7fffffffu;
    if (b > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (b >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (b < 0x38800000u) {
        float f;
        __builtin_memcpy(&f, &b, 4);
        f += 0.5f;
        __builtin_memcpy(&b, &f, 4);
        return static_cast<uint16_t>(sign | (b - 0x3f000000u));
    }
    b += 0xc8000fffu + ((b >> 13) & 1);
    return static_cast<uint16_t>(sign | (b >> 13));
}

inline float load_act(const void* p, ActType type, int64_t i) {
    return type == ActType::kF32 ? static_cast<const float*>(p)[i] : float_of_bf16(static_cast<const uint16_t*>(p)[i]);
}

inline void store_act(void* p, ActType type, int64_t i, float x) {
    if (type == ActType::kF32) {
        static_cast<float*>(p)[i] = x;
    } else {
        static_cast<uint16_t*>(p)[i] = bf16_of(x);
    }
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
