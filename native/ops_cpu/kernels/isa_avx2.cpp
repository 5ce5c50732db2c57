// The same loops as isa_generic.cpp, compiled for AVX2 with FMA.
#define HPCDECODE_ISA isa_avx2
#include "blocked_tile.h"
#include "steps.h"

namespace hpcdecode::ops::HPCDECODE_ISA {

extern const KernelTable table;
constexpr KernelTable table = make_table("avx2", blocked_products());

}  // namespace hpcdecode::ops::HPCDECODE_ISA
