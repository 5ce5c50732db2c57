// Activations of many numbers at once, in the instructions that loops do not get. Gates of GEMMs and steps of fused
// kernels share them, so that it does not matter to a result which of the two computed it.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "target.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

constexpr int kAtOnce = 4;  // vectors: one alone would wait for each of its steps
using Lot = __m512[kAtOnce];

inline __m512 all(float x) { return _mm512_set1_ps(x); }

// x / (1 + exp(-by)), whose exponential is infinite from 89 on: Cephes' expf, as in math.h.
inline void times_sigmoid(Lot& x, const Lot& by) {
    Lot n, r, p;
    for (int i = 0; i < kAtOnce; ++i) {
        const __m512 y = _mm512_max_ps(_mm512_min_ps(_mm512_sub_ps(all(0), by[i]), all(100)), all(-100));
        n[i] = _mm512_roundscale_ps(_mm512_mul_ps(y, all(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT);
        r[i] = _mm512_fnmadd_ps(n[i], all(-2.12194440e-4f), _mm512_fnmadd_ps(n[i], all(0.693359375f), y));
        p[i] = all(1.9875691500e-4f);
    }
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        for (int i = 0; i < kAtOnce; ++i) p[i] = _mm512_fmadd_ps(p[i], r[i], all(c));
    for (int i = 0; i < kAtOnce; ++i) p[i] = _mm512_fmadd_ps(_mm512_mul_ps(p[i], r[i]), r[i], r[i]);
    for (int i = 0; i < kAtOnce; ++i) p[i] = _mm512_scalef_ps(_mm512_add_ps(p[i], all(1)), n[i]);
    for (int i = 0; i < kAtOnce; ++i) x[i] = _mm512_div_ps(x[i], _mm512_add_ps(p[i], all(1)));
}

inline void silu(Lot& x) { times_sigmoid(x, x); }

// (1 + tanh(y)) / 2 is the sigmoid of 2 y.
inline void gelu_tanh(Lot& x) {
    Lot y;
    for (int i = 0; i < kAtOnce; ++i) {
        const __m512 cubed = _mm512_mul_ps(_mm512_mul_ps(x[i], x[i]), x[i]);
        y[i] = _mm512_mul_ps(_mm512_fmadd_ps(cubed, all(0.044715f), x[i]), all(1.59576912160573070f));
    }
    times_sigmoid(x, y);
}

// An activation of a row of n numbers.
template <void (*f)(Lot&)>
void of_row(int64_t n, const float* a, float* out) {
    constexpr int kWide = 16;
    for (int64_t k = 0; k < n; k += kAtOnce * kWide) {
        Lot x;
        const auto lanes = [&](int i) {
            const int64_t left = std::clamp<int64_t>(n - k - i * kWide, 0, kWide);
            return static_cast<__mmask16>((1u << left) - 1);
        };
        for (int i = 0; i < kAtOnce; ++i) x[i] = _mm512_maskz_loadu_ps(lanes(i), a + k + i * kWide);
        f(x);
        for (int i = 0; i < kAtOnce; ++i) _mm512_mask_storeu_ps(out + k + i * kWide, lanes(i), x[i]);
    }
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
