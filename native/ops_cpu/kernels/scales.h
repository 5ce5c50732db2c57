// Where a panel of weights in few bits has its scales.
#pragma once
#include "../weight_form.h"
#include "math.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

constexpr int kHalf = kPanel / 2;           // outputs
constexpr int64_t kHeadBytes = kPanel * 4;  // of a panel, before the weights

// Scales of a form for 32 inputs begin here.
template <class Layout>
inline const char* scales_of(const char* scales, int64_t input) {
    return scales + input / Layout::kGroup * Layout::kScaleBytes;
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
