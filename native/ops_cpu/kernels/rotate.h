// Rotation of activations before they are rounded to int8: a few large numbers are spread over all of them.
#pragma once
#include "../kernel_api.h"
#include "math.h"

namespace hpcdecode::ops::HPCDECODE_ISA {
namespace {

constexpr int kSixteen = kLeastRun;  // numbers of a vector
typedef float Sixteen __attribute__((vector_size(kSixteen * sizeof(float))));
typedef int32_t SixteenPlaces __attribute__((vector_size(kSixteen * sizeof(int32_t))));

inline Sixteen floats_at(const float* x) {
    Sixteen v;
    std::memcpy(&v, x, sizeof v);
    return v;
}

inline void put_floats(float* x, Sixteen v) { std::memcpy(x, &v, sizeof v); }

// Replaces every pair (a, b) of numbers of a vector that lie H apart by (a + b, a - b).
template <int H>
inline Sixteen pairs(Sixteen x) {
    SixteenPlaces other;
    Sixteen sign;
    for (int i = 0; i < kSixteen; ++i) {
        other[i] = i ^ H;
        sign[i] = (i & H) ? -1.0f : 1.0f;
    }
    return __builtin_shuffle(x, other) + x * sign;
}

// Multiplies `size` numbers, a power of two of at least kSixteen, by the Hadamard matrix and by `factor`.
inline void rotate_run(int64_t size, float factor, const float* x, float* out) {
    for (int64_t i = 0; i < size; i += kSixteen)
        put_floats(out + i, pairs<8>(pairs<4>(pairs<2>(pairs<1>(floats_at(x + i) * factor)))));
    for (int64_t half = kSixteen; half < size; half *= 2)
        for (int64_t i = 0; i < size; i += 2 * half)
            for (int64_t j = i; j < i + half; j += kSixteen) {
                const Sixteen one = floats_at(out + j), other = floats_at(out + j + half);
                put_floats(out + j, one + other);
                put_floats(out + j + half, one - other);
            }
}

// Multiplies the numbers that lie at one place of several runs by a symmetric matrix [runs, runs].
inline void mix_runs(int64_t runs, int64_t size, int64_t stride, const float* matrix, float* x) {
    Sixteen given[kMostRuns];
    for (int64_t k = 0; k < size; k += kSixteen) {
        for (int64_t j = 0; j < runs; ++j) given[j] = floats_at(x + j * stride + k);
        for (int64_t j = 0; j < runs; ++j) {
            Sixteen sum = given[0] * matrix[j * runs];
            for (int64_t l = 1; l < runs; ++l) sum += given[l] * matrix[j * runs + l];
            put_floats(x + j * stride + k, sum);
        }
    }
}

}  // namespace
}  // namespace hpcdecode::ops::HPCDECODE_ISA
