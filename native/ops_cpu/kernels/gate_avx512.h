// Gates: functions of one half of a panel's results, times the other half.
#pragma once
#include "units_avx512.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

constexpr int kAtOnce = 4;  // vectors: one alone would wait for each of its steps
using Lot = __m512[kAtOnce];

inline __m512 all(float x) { return _mm512_set1_ps(x); }

// x / (1 + exp(-by)), whose exponential is infinite from 89 on: Cephes' expf, as in math.h, in the instructions that
// loops do not get.
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

// Rounds as the steps of a fused kernel would. What is missing of the last rows is its last one again.
template <class Out, void (*f)(Lot&)>
void gate(int64_t rows, const char* results, char* out, int64_t out_bytes) {
    for (int64_t first = 0; first < rows; first += kAtOnce) {
        const auto row = [&](int i) { return std::min(first + i, rows - 1); };
        Lot x;
        for (int i = 0; i < kAtOnce; ++i) x[i] = Out::load(results + row(i) * Out::kPanelBytes, 0);
        f(x);
        for (int i = 0; i < kAtOnce; ++i) {
            const __m512 by = Out::load(results + row(i) * Out::kPanelBytes, kLanes);
            Out::store(out + row(i) * out_bytes, 0, kLanes, _mm512_mul_ps(Out::rounded(x[i]), by));
        }
    }
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
