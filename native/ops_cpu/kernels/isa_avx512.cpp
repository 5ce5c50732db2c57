// The kernels of AVX-512: GEMMs of float32 in its registers, those of bfloat16 and int8 in the compiler's vectors.
#define HPCDECODE_ISA isa_avx512
#include "form_tile.h"
#include "gate_avx512.h"
#include "steps.h"
#include "tile.h"
#include "units_avx512.h"

namespace hpcdecode::ops::HPCDECODE_ISA {

extern const KernelTable table;
constexpr KernelTable table =
    make_table("avx512",
               {{{tiles<Float32, ToFloat32>},
                 {nullptr, blocked_tile<VectorBfloat16, VectorToBfloat16>},
                 {blocked_tile<VectorInt8, VectorToFloat32>, blocked_tile<VectorInt8, VectorToBfloat16>}},
                {gate<ToFloat32, silu>, gate<ToBfloat16, silu>},
                {gate<ToFloat32, gelu_tanh>, gate<ToBfloat16, gelu_tanh>},
                nullptr,
                {kTileRows, kMostTileRows, kMostTileRows},
                {nullptr, values_of_bfloat16, values_of_int8}},
               form_kernels<ByFactors>());

}  // namespace hpcdecode::ops::HPCDECODE_ISA
