// Gates: functions of one half of a panel's results, times the other half.
#pragma once
#include "activations_avx512.h"
#include "units_avx512.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

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
