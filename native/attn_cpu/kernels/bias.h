// Numbers that are added to scores by the distance between query and key.
#pragma once
#include "math.h"
#include "numbers.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

static_assert(kChunk == kPromptTile);

// Writes the numbers that each row mixes profiles with, [rows][dim]. Row r is query token r / group.
inline void load_mixes(const BiasArgs& b, ActType type, int64_t stride, int group, int heads, int first, int rows,
                       float* out) {
    for (int h = 0; h < heads; ++h)
        for (int r = 0; r < rows; ++r, out += b.dim) {
            const int all = first + r;
            const int64_t at = all / group * stride + static_cast<int64_t>(h * group + all % group) * b.dim;
            for (int i = 0; i < b.dim; ++i) out[i] = load_act(b.mixes, type, at + i);
        }
}

constexpr auto kCount = [] {
    struct Count {
        alignas(64) float of[kChunk];
    } count{};
    for (int i = 0; i < kChunk; ++i) count.of[i] = static_cast<float>(i);
    return count;
}();

// Adds the negative distances of 64 positions, the first one being `first`, times the sum of `mixes`.
inline void add_distances(const BiasArgs& b, const float* mixes, int64_t first, F* scores) {
    float mix = 0.0f;
    for (int i = 0; i < b.dim; ++i) mix += mixes[i];
    const F from = vset(static_cast<float>(first)), slope = vset(mix);
    for (int j = 0; j < kChunk / W; ++j) scores[j] = vfma(slope, vadd(from, vload(kCount.of + j * W)), scores[j]);
}

// Adds biases to the scores of 64 positions from `base` on, for a query that is the last of `end` positions.
inline void add_biases(const BiasArgs& b, const float* mixes, int64_t base, int64_t end, F* scores) {
    if (b.profiles == nullptr) return add_distances(b, mixes, base - (end - 1), scores);
    const int64_t first = base - (end - b.extent);
    if (first <= -kChunk || first >= b.extent) return;
    const float* at = b.profiles + first;
    for (int i = 0; i < b.dim; ++i, at += b.stride) {
        const F mix = vset(mixes[i]);
#pragma GCC unroll 16
        for (int j = 0; j < kChunk / W; ++j) scores[j] = vfma(mix, vload(at + j * W), scores[j]);
    }
}

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
