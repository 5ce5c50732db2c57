// Rows of random numbers, the same in every run.
#pragma once
#include <cstdint>
#include <random>
#include <vector>

#include "matrix.h"

namespace {

std::mt19937 random_bits(7);

std::vector<float> normal(size_t n) {
    std::normal_distribution<float> d;
    std::vector<float> out(n);
    for (float& x : out) x = d(random_bits);
    return out;
}

hpcdecode::Matrix matrix(std::vector<float>& data, int64_t rows, int64_t columns) {
    return {data.data(), hpcdecode::ActType::kF32, rows, columns, columns};
}

}  // namespace
