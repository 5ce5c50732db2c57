#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernel_api.h"

namespace hpcdecode::ops::isa_avx512 {
namespace {
#include "math.h"
#include "steps.h"
#include "units_avx512.h"
//
#include "gate_avx512.h"
#include "tile.h"
}  // namespace
extern const KernelTable table;
constexpr KernelTable table =
    make_table("avx512", {{{tiles<Float32, ToFloat32>()}}, {gate<ToFloat32, silu>}, {gate<ToFloat32, gelu_tanh>}});
}  // namespace hpcdecode::ops::isa_avx512
