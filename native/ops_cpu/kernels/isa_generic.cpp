// The kernels of any processor: loops that the compiler vectorises.
#define HPCDECODE_ISA isa_generic
#include "steps.h"

namespace hpcdecode::ops::HPCDECODE_ISA {

extern const KernelTable table;
constexpr KernelTable table = make_table("generic");

}  // namespace hpcdecode::ops::HPCDECODE_ISA
