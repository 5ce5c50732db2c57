// A row of K or V on its way into the KV cache: rotated and scaled to whole numbers if the type wants it.
#pragma once
#include "rotate.h"
#include "storage.h"

namespace hpcdecode::HPCDECODE_ISA {
namespace {

template <class Act>
inline float widen(Act x) {
    if constexpr (sizeof(Act) == 4) return x;
    return float_of_bf16(x);
}

// S: how the row is stored, one of storage.h.
template <class S, class Act>
class Numbers {
  public:
    static constexpr int kStretch = kMaxRotation;  // dims that are converted at once
    static constexpr int kScales = S::kScaled ? 1 + S::kMiddle : 0;

    Numbers(const Act* x, int dims, int rotation) : from_(x), dims_(dims), rotation_(rotation) {
        if constexpr (S::kScaled) find_scales();
    }
    const uint16_t* scales() const { return scales_; }

    // Calls each(first, last, row) with dims [first, last), converted, at dim 0 of `row`; null bytes follow them.
    template <class Each>
    inline void stretches(Each each) {
        alignas(64) uint8_t row[kStretch * sizeof(float)] = {};
        for (int first = 0; first < dims_; first += kStretch) {
            const int n = convert(first, row, 0);
            if (n < kStretch) clear_rest(row, n);
            each(first, first + n, row);
        }
    }
    // Converts all dims to a row of the cache.
    inline void store(uint8_t* row) {
        for (int first = 0; first < dims_; first += kStretch) convert(first, row, first);
    }

  private:
    inline int load(int first) {
        const int n = dims_ - first < kStretch ? dims_ - first : kStretch;
        for (int d = 0; d < n; ++d) x_[d] = widen(from_[first + d]);
        if constexpr (S::kScaled) rotate(x_, n, rotation_);
        return n;
    }
    inline int convert(int first, uint8_t* row, int at) {
        const bool loaded = S::kScaled && dims_ <= kStretch;
        const int n = loaded ? dims_ : load(first);
        if constexpr (S::kScaled)
            for (int d = 0; d < n; ++d) x_[d] = (x_[d] - middle_) * inverse_;
        S::put(row, at, x_, n);
        return n;
    }
    // Padded elements must be no infinities of an earlier stretch. Whole numbers are finite.
    inline void clear_rest(uint8_t* row, int n) {
        if constexpr (!S::kScaled) {
            constexpr size_t kElement = S::kUnitBytes / (S::kSteps * kTile);
            __builtin_memset(row + n * kElement, 0, (kStretch - n) * kElement);
        }
    }

    inline void find_scales() {
        float low[kTile] = {}, high[kTile] = {};
        const auto spread = [&](int lane, float x) {
            low[lane] = x < low[lane] ? x : low[lane];
            high[lane] = x > high[lane] ? x : high[lane];
        };
        for (int first = 0; first < dims_; first += kStretch) {
            const int n = load(first);
            if (S::kMiddle && first == 0)
                for (int lane = 0; lane < kTile; ++lane) low[lane] = high[lane] = x_[0];
            int d = 0;
            for (; d + kTile <= n; d += kTile)
                for (int lane = 0; lane < kTile; ++lane) spread(lane, x_[d + lane]);
            for (; d < n; ++d) spread(0, x_[d]);
        }
        for (int lane = 1; lane < kTile; ++lane) {
            spread(0, low[lane]);
            spread(0, high[lane]);
        }
        const float range = S::kMiddle ? high[0] - low[0] : high[0] > -low[0] ? high[0] : -low[0];
        scales_[0] = bf16_of(range / static_cast<float>(S::kMiddle ? S::kHigh - S::kLow : S::kHigh));
        const float scale = float_of_bf16(scales_[0]);
        inverse_ = scale > 0.0f ? 1.0f / scale : 0.0f;
        if constexpr (S::kMiddle) {
            scales_[1] = bf16_of(low[0] - static_cast<float>(S::kLow) * scale);
            middle_ = float_of_bf16(scales_[1]);
        }
    }

    const Act* from_;
    int dims_, rotation_;
    float inverse_ = 1.0f, middle_ = 0.0f;
    uint16_t scales_[2] = {};
    float x_[kStretch];
};

}  // namespace
}  // namespace hpcdecode::HPCDECODE_ISA
