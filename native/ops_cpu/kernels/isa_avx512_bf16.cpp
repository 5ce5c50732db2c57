// The kernels of AVX-512 with products of bfloat16 (BF16) and of bytes (VNNI): all GEMMs.
#define HPCDECODE_ISA isa_avx512_bf16
#include "expand_avx512.h"
#include "gate_avx512.h"
#include "screen_avx512.h"
#include "steps.h"
#include "tile.h"
#include "units_avx512.h"

namespace hpcdecode::ops::HPCDECODE_ISA {

extern const KernelTable table;
constexpr KernelTable table = make_table("avx512_bf16",
                                         {{{tiles<Float32, ToFloat32>},
                                           {nullptr, tiles<Bfloat16, ToBfloat16>},
                                           {tiles<Int8, ToFloat32>, tiles<Int8, ToBfloat16>}},
                                          {gate<ToFloat32, silu>, gate<ToBfloat16, silu>},
                                          {gate<ToFloat32, gelu_tanh>, gate<ToBfloat16, gelu_tanh>},
                                          screen},
                                         form_kernels<InRegisters>());

}  // namespace hpcdecode::ops::HPCDECODE_ISA
