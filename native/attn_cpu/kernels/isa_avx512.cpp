#include <immintrin.h>

#include "../kernel_api.h"

namespace hpcdecode {
namespace isa_avx512 {
namespace {
constexpr Prefetching kPrefetching = {0, 4096};
#include "vec_avx512.h"
// clang-format off: each header needs the ones above it
#include "math.h"
#include "storage.h"
#include "tiles.h"
#include "plain_kernel.h"
#include "append.h"
#include "partial.h"
#include "softmax.h"
#include "attend_item.h"
#include "prefill_words.h"
#include "prefill_kernel.h"
#include "read.h"
#include "table.h"
// clang-format on
}  // namespace

extern const KernelTable table;
constexpr KernelTable table = make_table<PlainKernel, PlainKernel, FloatWords>("avx512");

}  // namespace isa_avx512
}  // namespace hpcdecode
