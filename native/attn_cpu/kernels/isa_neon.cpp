#include <arm_neon.h>

#include "../kernel_api.h"

namespace hpcdecode {
namespace isa_neon {
namespace {
constexpr Prefetching kPrefetching = {4, 4096};
#include "vec_neon.h"
// clang-format off: each header needs the ones above it
#include "math.h"
#include "storage.h"
#include "tiles.h"
#include "plain_kernel.h"
#include "append.h"
#include "partial.h"
#include "softmax.h"
#include "attend_item.h"
#include "read.h"
#include "table.h"
// clang-format on
}  // namespace

extern const KernelTable table;
constexpr KernelTable table = make_table<PlainKernel, PlainKernel>("neon");

}  // namespace isa_neon
}  // namespace hpcdecode
