// The instruction set that kernel headers are compiled for.
//
// Every file isa_*.cpp defines HPCDECODE_ISA, then includes its kernels.
#pragma once
#include "../kernel_api.h"

#ifndef HPCDECODE_ISA
#define HPCDECODE_ISA isa_of_flags  // namespace of the kernels
#endif
