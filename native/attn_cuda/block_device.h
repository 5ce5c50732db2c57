// A block on the device, for nvcc.
#pragma once
#include "block_base.h"

namespace hpcdecode {

template <class T>
struct Own {
    T value;
    HPC_DEVICE T& operator[](int) { return value; }
    HPC_DEVICE const T& operator[](int) const { return value; }
};

struct Block {
    int x, y;       // index in the grid
    uint8_t* smem;  // 16-byte aligned

    template <class F>
    HPC_DEVICE void each(F&& f) const {
        f(static_cast<int>(threadIdx.x));
    }
    HPC_DEVICE void sync() const { __syncthreads(); }
    HPC_DEVICE void sync_warp() const { __syncwarp(); }  // each warp for itself

    // The value of the lane whose number differs in the bits of `mask`. Every thread calls this.
    template <class T>
    HPC_DEVICE Own<T> exchange(const Own<T>& x, int mask) const {
        return {__shfl_xor_sync(0xffffffffu, x.value, mask)};
    }

    // 16 bytes from global to shared memory, zeros where not `there`; `commit` closes a group of them.
    HPC_DEVICE void copy16(void* to, const void* from, bool there) const {
        const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
        const int bytes = there ? 16 : 0;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(at), "l"(from), "r"(bytes) : "memory");
    }
    HPC_DEVICE void commit() const { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
    // Until all but the last N groups of this thread are there; a barrier makes them seen by the others.
    template <int N>
    HPC_DEVICE void wait() const {
        asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
    }
};

HPC_DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
HPC_DEVICE uint32_t as_bits(float x) { return __float_as_uint(x); }
HPC_DEVICE uint16_t bf16_of(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
// Returns the differences of two pairs of bfloat16 numbers.
HPC_DEVICE uint32_t minus_bf16(uint32_t a, uint32_t b) {
    const __nv_bfloat162 d = __hsub2(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
    return reinterpret_cast<const uint32_t&>(d);
}
HPC_DEVICE uint16_t f16_of(float x) { return __half_as_ushort(__float2half_rn(x)); }
HPC_DEVICE float float_of_f16(uint16_t h) { return __half2float(__ushort_as_half(h)); }
// Return two numbers of 16 bits, x in the low half.
HPC_DEVICE uint32_t two_bf16(float x, float y) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(two);
}
HPC_DEVICE uint32_t two_f16(float x, float y) {
    const __half2 two = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(two);
}
// Returns `bits`, which the compiler takes for unknown and keeps in a register: an instruction of logic has room for
// one constant.
HPC_DEVICE uint32_t in_register(uint32_t bits) {
    uint32_t kept;
    asm volatile("{ .reg .u32 zero; mov.u32 zero, %%tid.y; or.b32 %0, zero, %1; }\n" : "=r"(kept) : "r"(bits));
    return kept;
}
// Returns the bytes of `two` in the low bytes of each half.
HPC_DEVICE uint32_t bytes_apart(uint32_t two) { return __byte_perm(two, 0, 0x4140); }
// Returns 2^x, or 0 where that is below 2^-126.
HPC_DEVICE float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}
HPC_DEVICE float infinity() { return as_float(0x7f800000u); }

}  // namespace hpcdecode
