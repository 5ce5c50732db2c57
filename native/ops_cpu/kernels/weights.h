// The weights of a row of logits, for sampling.
#pragma once
#include "math.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

// Reduces running values, one half onto the other.
template <int kLanes, class F>
inline float folded(float (&lanes)[kLanes], F f) {
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int l = 0; l < width; ++l) lanes[l] = f(lanes[l], lanes[l + width]);
    return lanes[0];
}

inline float add_f(float x, float y) { return x + y; }
inline float maximum_f(float x, float y) { return x < y ? y : x; }

inline float largest(int64_t n, const float* x) {
    constexpr int kLanes = 64;
    float lanes[kLanes];
    for (int l = 0; l < kLanes; ++l) lanes[l] = -HUGE_VALF;
    int64_t k = 0;
    for (; k + kLanes <= n; k += kLanes)
        for (int l = 0; l < kLanes; ++l) lanes[l] = maximum_f(lanes[l], x[k + l]);
    for (int l = 0; k + l < n; ++l) lanes[l] = maximum_f(lanes[l], x[k + l]);
    return folded(lanes, maximum_f);
}

inline void weigh(int64_t n, float top, float by, float* x) {
    for (int64_t k = 0; k < n; ++k) x[k] = exp_f((x[k] - top) * by);
}

inline float sum_from(int64_t n, const float* weights, float floor) {
    constexpr int kLanes = 64;
    float lanes[kLanes] = {};
    int64_t k = 0;
    for (; k + kLanes <= n; k += kLanes)
        for (int l = 0; l < kLanes; ++l) lanes[l] += weights[k + l] >= floor ? weights[k + l] : 0.0f;
    for (int l = 0; k + l < n; ++l) lanes[l] += weights[k + l] >= floor ? weights[k + l] : 0.0f;
    return folded(lanes, add_f);
}

inline void sums_from(int64_t n, const float* __restrict weights, const float* floors, double* sums) {
    constexpr int kLanes = 32;
    float lanes[kFloors][kLanes] = {};
    int64_t k = 0;
    for (; k + kLanes <= n; k += kLanes)
        for (int f = 0; f < kFloors; ++f)
            for (int l = 0; l < kLanes; ++l) lanes[f][l] += weights[k + l] >= floors[f] ? weights[k + l] : 0.0f;
    for (int f = 0; f < kFloors; ++f) {
        for (int l = 0; k + l < n; ++l) lanes[f][l] += weights[k + l] >= floors[f] ? weights[k + l] : 0.0f;
        sums[f] += folded(lanes[f], add_f);
    }
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
