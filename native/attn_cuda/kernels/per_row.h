// What a thread keeps of N rows.
#pragma once
#include "../block.h"

namespace hpcdecode {

template <int N>
struct PerRow {
    float v[N];

    HPC_DEVICE void fill(float x) {
        HPC_UNROLL
        for (int i = 0; i < N; ++i) v[i] = x;
    }
};

// Reduce every float over neighbouring lanes, as larger_of and sum_of do.
template <int Lanes, int N>
HPC_DEVICE void larger_of_rows(Block& block, Own<PerRow<N>>& x) {
    HPC_UNROLL
    for (int i = 0; i < N; ++i) {
        Own<float> one;
        block.each([&](int t) { one[t] = x[t].v[i]; });
        larger_of<Lanes>(block, one);
        block.each([&](int t) { x[t].v[i] = one[t]; });
    }
}
template <int Lanes, int N>
HPC_DEVICE void sum_of_rows(Block& block, Own<PerRow<N>>& x) {
    HPC_UNROLL
    for (int i = 0; i < N; ++i) {
        Own<float> one;
        block.each([&](int t) { one[t] = x[t].v[i]; });
        sum_of<Lanes>(block, one);
        block.each([&](int t) { x[t].v[i] = one[t]; });
    }
}

}  // namespace hpcdecode
