// The data types of the KV cache and of activations. Plain data only, because kernels include this header too.
#pragma once

namespace hpcdecode {

enum class KvType : int { kF32, kF16, kBF16, kI8, kK8V4, kI4 };
enum class ActType : int { kF32, kBF16 };
constexpr int kNumKvTypes = 6;

}  // namespace hpcdecode
