// Rotation by a Hadamard matrix, which spreads the large elements of a row over all of it before it is rounded.
//
// K and queries are rotated alike, so that scores stay; sums of rotated values are rotated back. The matrix is without
// its factor 1 / sqrt(n): who multiplies twice divides by n, which is exact because n is a power of two.
#pragma once
#include "math.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

// Replaces every pair (a, b) of elements that lie H apart by (a + b, a - b).
template <int H>
inline void add_pairs(float* x, int dims) {
    if constexpr (H >= W) {
        for (int i = 0; i < dims; i += 2 * H) {
            for (int j = i; j < i + H; j += W) {
                const F a = vload(x + j), b = vload(x + j + H);
                vstore(x + j, vadd(a, b));
                vstore(x + j + H, vsub(a, b));
            }
        }
    } else {
        for (int i = 0; i < dims; i += 2 * H) {
#pragma GCC unroll 8
            for (int j = 0; j < H; ++j) {
                const float a = x[i + j], b = x[i + j + H];
                x[i + j] = a + b;
                x[i + j + H] = a - b;
            }
        }
    }
}

// Multiplies parts of `rotation` elements, a power of two that divides `dims`, by the Hadamard matrix.
template <int H = 1>
inline void rotate(float* x, int dims, int rotation) {
    if (H >= rotation) return;
    add_pairs<H>(x, dims);
    if constexpr (2 * H < kMaxRotation) rotate<2 * H>(x, dims, rotation);
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
