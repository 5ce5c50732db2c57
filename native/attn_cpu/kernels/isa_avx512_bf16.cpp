// The kernels of AVX-512 with products of bfloat16 (BF16) and of bytes (VNNI).
#define HPCDECODE_ISA isa_avx512_bf16
#define HPCDECODE_VECTORS "vec_avx512.h"
#define HPCDECODE_PREFETCHING Prefetching{1, 8192, 2}
#include "bf16_kernel.h"
#include "prefill_pairs.h"
#include "quad_kernel.h"
#include "table.h"

namespace hpcdecode::HPCDECODE_ISA {

extern const KernelTable table;
constexpr KernelTable table = make_table<PairKernel, QuadKernel, PairWords>("avx512_bf16");

}  // namespace hpcdecode::HPCDECODE_ISA
