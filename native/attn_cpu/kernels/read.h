// Reads a buffer once, or rewrites it, for the bandwidth that kernels are compared with.
#pragma once
#include "math.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

inline double read_all(const uint8_t* data, size_t bytes) {
    constexpr size_t kStep = 8 * W * sizeof(float);
    constexpr size_t kAhead = 4096;
    F acc[8];
    for (int i = 0; i < 8; ++i) acc[i] = vzero();
    for (size_t at = 0; at + kStep <= bytes; at += kStep) {
        const float* p = reinterpret_cast<const float*>(data + at);
        for (size_t line = 0; line < kStep; line += 64) __builtin_prefetch(data + at + kAhead + line);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) acc[i] = vmax(acc[i], vload(p + i * W));
    }
    for (int i = 1; i < 8; ++i) acc[0] = vmax(acc[0], acc[i]);
    return hmax(acc[0]);
}

inline void rewrite_all(uint8_t* data, size_t bytes, float one) {
    constexpr size_t kStep = 8 * W * sizeof(float);
    const F factor = vset(one);
    for (size_t at = 0; at + kStep <= bytes; at += kStep) {
        float* p = reinterpret_cast<float*>(data + at);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) vstore(p + i * W, vmul(factor, vload(p + i * W)));
    }
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
