// Rotation of rows in shared memory by a Hadamard matrix, as native/attn_cpu/kernels/rotate.h has it.
#pragma once
#include "../block.h"

namespace hpcdecode {

// Multiplies parts of `rotation` elements, a power of two that divides `elements`, by the matrix of entries 1 and -1.
// Begins and ends with a barrier.
HPC_DEVICE void rotate(Block& block, float* x, int elements, int rotation) {
    block.sync();
    for (int half = 1; half < rotation; half *= 2) {
        block.each([&](int t) {
            for (int i = t; i < elements / 2; i += kThreads) {
                const int at = i / half * 2 * half + i % half;
                const float a = x[at], b = x[at + half];
                x[at] = a + b;
                x[at + half] = a - b;
            }
        });
        block.sync();
    }
}

}  // namespace hpcdecode
