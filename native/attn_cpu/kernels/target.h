// The instruction set that kernel headers are compiled for.
//
// Every file isa_*.cpp defines the macros below, then includes its kernels. A header that is compiled on its own is for
// the best instruction set that the compiler's flags allow.
#pragma once
#include "../kernel_api.h"

#ifndef HPCDECODE_ISA
#define HPCDECODE_ISA isa_of_flags  // namespace of the kernels
#define HPCDECODE_PREFETCHING Prefetching{4, 4096}
#if defined(__AVX512F__)
#define HPCDECODE_VECTORS "vec_avx512.h"  // the vectors that kernels compute with
#elif defined(__AVX2__)
#define HPCDECODE_VECTORS "vec_avx2.h"
#elif defined(__aarch64__)
#define HPCDECODE_VECTORS "vec_neon.h"
#else
#define HPCDECODE_VECTORS "vec_generic.h"
#endif
#endif
