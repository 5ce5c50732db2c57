#include <cmath>
#include <cstdint>
#include <cstring>

#include "../kernel_api.h"

namespace hpcdecode::ops::isa_generic {
namespace {
#include "math.h"
#include "steps.h"
}  // namespace
extern const KernelTable table;
constexpr KernelTable table = make_table("generic");
}  // namespace hpcdecode::ops::isa_generic
