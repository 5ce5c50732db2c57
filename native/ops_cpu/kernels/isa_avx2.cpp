// The same loops as isa_generic.cpp, compiled for AVX2 with FMA.
#define HPCDECODE_ISA isa_avx2
#include "form_tile.h"
#include "steps.h"

namespace hpcdecode::ops::HPCDECODE_ISA {

extern const KernelTable table;
constexpr KernelTable table =
    make_table("avx2",
               {{{blocked_tile<VectorFloat32, VectorToFloat32>},
                 {nullptr, blocked_tile<VectorBfloat16, VectorToBfloat16>},
                 {blocked_tile<VectorInt8, VectorToFloat32>, blocked_tile<VectorInt8, VectorToBfloat16>}},
                {vector_gate<VectorToFloat32, silu_f>, vector_gate<VectorToBfloat16, silu_f>},
                {vector_gate<VectorToFloat32, gelu_tanh_f>, vector_gate<VectorToBfloat16, gelu_tanh_f>},
                nullptr,
                {kMostTileRows, kMostTileRows, kMostTileRows},
                {nullptr, values_of_bfloat16, values_of_int8}},
               form_kernels<ByFactors>());

}  // namespace hpcdecode::ops::HPCDECODE_ISA
