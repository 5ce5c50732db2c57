// 4 floats per vector, 32 registers, on every aarch64.
#pragma once
#include <arm_neon.h>

#include "target.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

constexpr int W = 4;
constexpr int kMaxRows = 4;
constexpr int kAccs = 16;
constexpr int kWideTurn = 1;
using F = float32x4_t;

inline F vload(const float* p) { return vld1q_f32(p); }
inline void vstore(float* p, F a) { vst1q_f32(p, a); }
inline F vset(float x) { return vdupq_n_f32(x); }
inline F vzero() { return vset(0.0f); }
inline F vfma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F vmul(F a, F b) { return vmulq_f32(a, b); }
inline F vadd(F a, F b) { return vaddq_f32(a, b); }
inline F vsub(F a, F b) { return vsubq_f32(a, b); }
inline F vdiv(F a, F b) { return vdivq_f32(a, b); }
inline F vmax(F a, F b) { return vmaxq_f32(a, b); }
inline bool any_greater(F a, float b) { return vmaxvq_u32(vcgtq_f32(a, vset(b))) != 0; }
inline float hmax(F a) { return vmaxvq_f32(a); }
inline float hsum(F a) { return vaddvq_f32(a); }

inline F load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline F load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
    const uint32x4_t x = vreinterpretq_u32_u16(vld1q_u16(p));
    even = vreinterpretq_f32_u32(vshlq_n_u32(x, 16));
    odd = vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000u)));
}

// Signed bits [bit, bit + size) of every lane.
inline F field(int32x4_t x, int bit, int size) {
    const int32x4_t high = vshlq_s32(x, vdupq_n_s32(32 - size - bit));
    return vcvtq_f32_s32(vshlq_s32(high, vdupq_n_s32(size - 32)));
}
inline void load_i8_pairs(const uint8_t* p, int pair, F& even, F& odd) {
    const int32x4_t x = vreinterpretq_s32_u8(vld1q_u8(p));
    even = field(x, 16 * pair, 8);
    odd = field(x, 16 * pair + 8, 8);
}

// Codes 0..15 stand for -8..7: the sign bit is turned over.
inline void load_i4_pairs(const uint8_t* p, int bit, F& low, F& high) {
    const int32x4_t x = vreinterpretq_s32_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(0x88)));
    low = field(x, bit, 4);
    high = field(x, bit + 8, 4);
}

// Codes 0..63 stand for -32..31: their low bits begin at `bit` and bit + 8, their high bits at `at` and at + 8.
inline void load_i6_pairs(const uint8_t* p, int bit, const uint8_t* high_bits, int at, F& low, F& high) {
    const uint32x4_t x = vreinterpretq_u32_u8(vld1q_u8(p)), y = vreinterpretq_u32_u8(vld1q_u8(high_bits));
    const auto code = [&](int byte) {
        const uint32x4_t four = vandq_u32(vshlq_u32(x, vdupq_n_s32(-bit - byte)), vdupq_n_u32(15));
        const uint32x4_t two = vandq_u32(vshlq_u32(y, vdupq_n_s32(-at - byte)), vdupq_n_u32(3));
        const int32x4_t all = vreinterpretq_s32_u32(vorrq_u32(four, vshlq_n_u32(two, 4)));
        return vcvtq_f32_s32(vsubq_s32(all, vdupq_n_s32(32)));
    };
    low = code(0);
    high = code(8);
}

// Lanes outside [lo, hi) become -inf.
inline F keep_lanes(F a, int lo, int hi) {
    const int32_t lanes[W] = {0, 1, 2, 3};
    const int32x4_t lane = vld1q_s32(lanes);
    const uint32x4_t keep = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(lo)), vcltq_s32(lane, vdupq_n_s32(hi)));
    return vbslq_f32(keep, a, vset(-__builtin_inff()));
}

inline F fraction(F t) { return vsubq_f32(t, vrndmq_f32(t)); }  // t - floor(t); NaN of -inf

// p * 2^floor(t); zero where t < -126, whatever p is.
inline F times_exp2(F p, F t) {
    const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtmq_s32_f32(t), vdupq_n_s32(127)), 23);
    const uint32x4_t drop = vcltq_f32(t, vset(-126.0f));
    const F x = vmulq_f32(p, vreinterpretq_f32_s32(power));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), drop));
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
