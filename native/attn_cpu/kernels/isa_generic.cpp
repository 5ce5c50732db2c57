// The kernels of any processor, by vector extensions of the compiler.
#define HPCDECODE_ISA isa_generic
#define HPCDECODE_VECTORS "vec_generic.h"
#define HPCDECODE_PREFETCHING Prefetching{4, 4096}
#include "table.h"

namespace hpcdecode::HPCDECODE_ISA {

extern const KernelTable table;
constexpr KernelTable table = make_table<PlainKernel, PlainKernel, FloatWords>("generic");

}  // namespace hpcdecode::HPCDECODE_ISA
