#include <cmath>
#include <cstdint>
#include <cstring>

#include "../kernel_api.h"

namespace hpcdecode::ops::isa_avx512 {
namespace {
#include "math.h"
#include "steps.h"
}  // namespace
extern const KernelTable table = make_table("avx512");
}  // namespace hpcdecode::ops::isa_avx512
