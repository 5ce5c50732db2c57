// The kernels of AVX-512 with tiles (AMX): GEMMs of bfloat16 and int8 in tile registers.
#ifdef HPCDECODE_EMULATE_TILES
#define HPCDECODE_ISA isa_amx_emulated
#define HPCDECODE_ISA_NAME "amx_emulated"
#else
#define HPCDECODE_ISA isa_amx
#define HPCDECODE_ISA_NAME "amx"
#endif
#include "expand_avx512.h"
#include "gate_avx512.h"
#include "screen_avx512.h"
#include "steps.h"
#include "tile.h"
#include "tile_amx.h"

namespace hpcdecode::ops::HPCDECODE_ISA {

extern const KernelTable table;
constexpr KernelTable table = make_table(HPCDECODE_ISA_NAME,
                                         {{{tiles<Float32, ToFloat32>},
                                           {nullptr, amx_tiles<PairProducts, ToBfloat16>},
                                           {amx_tiles<QuadProducts, ToFloat32>, amx_tiles<QuadProducts, ToBfloat16>}},
                                          {gate<ToFloat32, silu>, gate<ToBfloat16, silu>},
                                          {gate<ToFloat32, gelu_tanh>, gate<ToBfloat16, gelu_tanh>},
                                          screen,
                                          {kTileRows, kMostTileRows, kMostTileRows}},
                                         form_kernels<InTiles>());

}  // namespace hpcdecode::ops::HPCDECODE_ISA
