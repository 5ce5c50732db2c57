// The same loops as isa_generic.cpp, compiled for AVX2 with FMA.
#define HPCDECODE_ISA isa_avx2
#include "blocked_tile.h"
#include "expand.h"
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
               in_loops<Int4>(), in_loops<Mxfp4>(), in_loops<Fp8>(), in_loops<Q41>(), in_loops<Q80>(), in_loops<Q4K>(),
               in_loops<Q5K>(), in_loops<Q6K>(), widened);

}  // namespace hpcdecode::ops::HPCDECODE_ISA
