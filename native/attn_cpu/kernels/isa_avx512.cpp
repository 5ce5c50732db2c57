// The kernels of AVX-512.
#define HPCDECODE_ISA isa_avx512
#define HPCDECODE_VECTORS "vec_avx512.h"
#define HPCDECODE_PREFETCHING Prefetching{0, 4096}
#include "table.h"

namespace hpcdecode::HPCDECODE_ISA {

extern const KernelTable table;
constexpr KernelTable table = make_table<PlainKernel, PlainKernel, FloatWords>("avx512");

}  // namespace hpcdecode::HPCDECODE_ISA
