// The kernels of AVX2 with FMA.
#define HPCDECODE_ISA isa_avx2
#define HPCDECODE_VECTORS "vec_avx2.h"
#define HPCDECODE_PREFETCHING Prefetching{4, 4096}
#include "table.h"

namespace hpcdecode::HPCDECODE_ISA {

extern const KernelTable table;
constexpr KernelTable table = make_table<PlainKernel, PlainKernel, FloatWords>("avx2");

}  // namespace hpcdecode::HPCDECODE_ISA
