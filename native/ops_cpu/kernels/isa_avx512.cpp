// The kernels of AVX-512: GEMMs of float32.
#define HPCDECODE_ISA isa_avx512
#include "gate_avx512.h"
#include "steps.h"
#include "tile.h"
#include "units_avx512.h"

namespace hpcdecode::ops::HPCDECODE_ISA {

extern const KernelTable table;
constexpr KernelTable table =
    make_table("avx512", {{{tiles<Float32, ToFloat32>()}}, {gate<ToFloat32, silu>}, {gate<ToFloat32, gelu_tanh>}});

}  // namespace hpcdecode::ops::HPCDECODE_ISA
