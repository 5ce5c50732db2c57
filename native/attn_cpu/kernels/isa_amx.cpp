#include <immintrin.h>

#include "../kernel_api.h"

#ifdef HPCDECODE_EMULATE_TILES
#define HPCDECODE_ISA isa_amx_emulated
#define HPCDECODE_ISA_NAME "amx_emulated"
#else
#define HPCDECODE_ISA isa_amx
#define HPCDECODE_ISA_NAME "amx"
#endif

namespace hpcdecode {
namespace HPCDECODE_ISA {
namespace {
constexpr Prefetching kPrefetching = {0, 8192};
#include "vec_avx512.h"
// clang-format off: each header needs the ones above it
#include "math.h"
#include "storage.h"
#include "tiles.h"
#include "plain_kernel.h"
#include "bf16_kernel.h"
#include "quad_kernel.h"
#ifdef HPCDECODE_EMULATE_TILES
#include "tile_unit_emulated.h"
#else
#include "tile_unit.h"
#endif
#include "tile_kernel.h"
#include "tile_pair_kernel.h"
#include "tile_quad_kernel.h"
#include "append.h"
#include "partial.h"
#include "softmax.h"
#include "attend_item.h"
#include "prefill_words.h"
#include "prefill_pairs.h"
#include "prefill_tile_pairs.h"
#include "prefill_kernel.h"
#include "read.h"
#include "table.h"
// clang-format on
}  // namespace

extern const KernelTable table;
constexpr KernelTable table = make_table<TilePairKernel, TileQuadKernel, TilePairWords>(HPCDECODE_ISA_NAME);

}  // namespace HPCDECODE_ISA
}  // namespace hpcdecode
