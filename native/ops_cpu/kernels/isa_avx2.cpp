#include <cmath>
#include <cstdint>
#include <cstring>

#include "../kernel_api.h"

namespace hpcdecode::ops::isa_avx2 {
namespace {
#include "math.h"
#include "steps.h"
}  // namespace
extern const KernelTable table;
constexpr KernelTable table = make_table("avx2");
}  // namespace hpcdecode::ops::isa_avx2
