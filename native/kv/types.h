// The data types of the KV cache and of activations, and limits. Plain data only, because kernels include this header
// too.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define HPC_ANYWHERE __host__ __device__
#else
#define HPC_ANYWHERE
#endif

namespace hpcdecode {

enum class KvType : int { kF32, kF16, kBF16, kI8, kK8V4, kI4 };
enum class ActType : int { kF32, kBF16 };
constexpr int kNumKvTypes = 6;
constexpr int kMaxTaps = 64;       // of a recurrent layer's convolution
constexpr int kMaxLaneRows = 256;  // k_dim of recurrent layers whose heads have one value

// Which of the positions up to its own a query sees: the last `size`, or those of its own chunk of so many.
struct Window {
    int64_t size = 0;  // 0: all
    bool chunked = false;

    HPC_ANYWHERE explicit operator bool() const { return size > 0; }
    // Returns the first position that the last of `end` positions sees.
    HPC_ANYWHERE int64_t first(int64_t end) const {
        if (size == 0 || end <= size) return 0;
        return chunked ? (end - 1) / size * size : end - size;
    }
};

}  // namespace hpcdecode
