#include <immintrin.h>

#include "../kernel_api.h"

namespace hpcdecode {
namespace isa_avx512_bf16 {
namespace {
constexpr Prefetching kPrefetching = {1, 8192, 2};
#include "vec_avx512.h"
// clang-format off: each header needs the ones above it
#include "math.h"
#include "storage.h"
#include "tiles.h"
#include "plain_kernel.h"
#include "bf16_kernel.h"
#include "quad_kernel.h"
#include "append.h"
#include "partial.h"
#include "softmax.h"
#include "attend_item.h"
#include "prefill_words.h"
#include "prefill_pairs.h"
#include "prefill_kernel.h"
#include "read.h"
#include "table.h"
// clang-format on
}  // namespace

extern const KernelTable table;
constexpr KernelTable table = make_table<PairKernel, QuadKernel, PairWords>("avx512_bf16");

}  // namespace isa_avx512_bf16
}  // namespace hpcdecode
