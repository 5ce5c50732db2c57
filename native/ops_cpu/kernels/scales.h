// The scales of weights in few bits, for half a panel's outputs.
#pragma once
#include "../weight_form.h"
#include "math.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

constexpr int kHalf = kPanel / 2;           // outputs
constexpr int64_t kHeadBytes = kPanel * 4;  // of a panel, before the weights
constexpr float kE2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

inline float from_half(uint16_t x) {
    const float magnitude = bits<float>((x & 0x7fffu) << 13) * 0x1p112f;
    return (x & 0x8000u) != 0 ? -magnitude : magnitude;
}

template <class T>
inline T loaded(const char* p, int64_t i) {
    T x;
    std::memcpy(&x, p + i * sizeof x, sizeof x);
    return x;
}

// Scales of a form for 32 inputs begin here.
template <class Layout>
inline const char* scales_of(const char* scales, int64_t input) {
    return scales + input / Layout::kGroup * Layout::kScaleBytes;
}

// A weight is code * scale + start.
struct Affine16 {
    float scale[kHalf], start[kHalf];
};

// Scales of two levels; products of theirs are exact.
template <class Layout>
inline Affine16 of_levels(const char* scales, int64_t input) {
    scales = scales_of<Layout>(scales, input);
    const char* own = scales + 4 * kHalf + input % Layout::kGroup / kBlockInputs * 2 * kHalf;
    Affine16 by;
    for (int o = 0; o < kHalf; ++o) {
        by.scale[o] = from_half(loaded<uint16_t>(scales, o)) * static_cast<float>(loaded<uint8_t>(own, o));
        by.start[o] =
            -(from_half(loaded<uint16_t>(scales, kHalf + o)) * static_cast<float>(loaded<uint8_t>(own, kHalf + o)));
    }
    return by;
}

// Scales of 16 inputs each.
inline void q6_k_scales(const char* scales, int64_t input, Affine16 (&by)[2]) {
    scales = scales_of<Q6KLayout>(scales, input);
    const char* own = scales + 2 * kHalf + input % Q6KLayout::kGroup / kHalf * kHalf;
    for (int group = 0; group < 2; ++group)
        for (int o = 0; o < kHalf; ++o) {
            const float whole = static_cast<float>(loaded<int8_t>(own, group * kHalf + o));
            by[group].scale[o] = from_half(loaded<uint16_t>(scales, o)) * whole;
            by[group].start[o] = 0.0f;
        }
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
