// The kernels of AVX-512 with tiles (AMX).
#ifdef HPCDECODE_EMULATE_TILES
#define HPCDECODE_ISA isa_amx_emulated
#define HPCDECODE_ISA_NAME "amx_emulated"
#else
#define HPCDECODE_ISA isa_amx
#define HPCDECODE_ISA_NAME "amx"
#endif
#define HPCDECODE_VECTORS "vec_avx512.h"
#define HPCDECODE_PREFETCHING Prefetching{0, 8192}
#include "prefill_tile_pairs.h"
#include "table.h"
#include "tile_pair_kernel.h"
#include "tile_quad_kernel.h"

namespace hpcdecode::HPCDECODE_ISA {

extern const KernelTable table;
constexpr KernelTable table = make_table<TilePairKernel, TileQuadKernel, TilePairWords>(HPCDECODE_ISA_NAME);

}  // namespace hpcdecode::HPCDECODE_ISA
