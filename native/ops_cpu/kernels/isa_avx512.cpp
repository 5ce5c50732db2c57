// The kernels of AVX-512: GEMMs of float32 in its registers, those of bfloat16 and int8 in the compiler's vectors.
#define HPCDECODE_ISA isa_avx512
#include "blocked_tile.h"
#include "gate_avx512.h"
#include "steps.h"
#include "tile.h"
#include "units_avx512.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

constexpr Products float32_products() {
    return {{{tiles<Float32, ToFloat32>(), nullptr}, {}, {}},
            {gate<ToFloat32, silu>, nullptr},
            {gate<ToFloat32, gelu_tanh>, nullptr},
            nullptr};
}

constexpr Products all_products() {
    Products all = blocked_products(), own = float32_products();
    all.of[0][0] = own.of[0][0];
    all.silu[0] = own.silu[0];
    all.gelu_tanh[0] = own.gelu_tanh[0];
    return all;
}

}  // namespace

extern const KernelTable table, amx_table;
constexpr KernelTable table = make_table("avx512", all_products());
constexpr KernelTable amx_table = make_table("amx", float32_products());  // oneDNN's others use AMX tiles

}  // namespace hpcdecode::ops::HPCDECODE_ISA
