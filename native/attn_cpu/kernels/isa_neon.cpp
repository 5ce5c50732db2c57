// The kernels of every aarch64.
#define HPCDECODE_ISA isa_neon
#define HPCDECODE_VECTORS "vec_neon.h"
#define HPCDECODE_PREFETCHING Prefetching{4, 4096}
#include "table.h"

namespace hpcdecode::HPCDECODE_ISA {

extern const KernelTable table;
constexpr KernelTable table = make_table<PlainKernel, PlainKernel, FloatWords>("neon");

}  // namespace hpcdecode::HPCDECODE_ISA
