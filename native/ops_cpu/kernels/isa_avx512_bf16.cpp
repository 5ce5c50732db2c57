#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernel_api.h"

namespace hpcdecode::ops::isa_avx512_bf16 {
namespace {
#include "math.h"
#include "steps.h"
#include "units_avx512.h"
//
#include "gate_avx512.h"
#include "screen_avx512.h"
#include "tile.h"
}  // namespace
extern const KernelTable table;
constexpr KernelTable table = make_table("avx512_bf16", {{{tiles<Float32, ToFloat32>()},
                                                          {nullptr, tiles<Bfloat16, ToBfloat16>()},
                                                          {tiles<Int8, ToFloat32>(), tiles<Int8, ToBfloat16>()}},
                                                         {gate<ToFloat32, silu>, gate<ToBfloat16, silu>},
                                                         {gate<ToFloat32, gelu_tanh>, gate<ToBfloat16, gelu_tanh>},
                                                         screen});
}  // namespace hpcdecode::ops::isa_avx512_bf16
