// A fused kernel: the element-wise work between two GEMMs, run token by token on values that stay in cache.
//
// A step reads and writes float32 scratch memory of its thread; loads and stores convert. A token's bits depend neither
// on other tokens nor on the number of threads.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hpcdecode::ops {

enum class Type : int { f32, bf16, i8, i64 };  // i8, i64: of memory only
constexpr int64_t kBytes[] = {4, 2, 1, 8};     // by type
constexpr int64_t kLine = 64;                  // bytes of a cache line

enum class Op : int {
    // clang-format off
    load, store, copy, neg, add, sub, mul, div, sqrt, rsqrt, reciprocal, exp, tanh, sigmoid, silu, gelu, gelu_tanh, relu,
    softplus, minimum, maximum, sum, peak, rotate, most, top, pick, mark, fill,
    // clang-format on
    count,
};

// A view of scratch memory, in floats.
struct View {
    int64_t at = 0;
    int64_t stride[3] = {0, 0, 0};
};

// out[i][j][k] = op(a[i][j][k], b[i][j][k] or scalar). `sum` and `peak` (the largest magnitude) reduce k and multiply
// by `scalar`, as `most` does, which finds the largest. `rotate` multiplies j and k, dense numbers, by a Hartley and a
// Hadamard matrix and by `scalar`. `top` writes the places of the largest k of a row of a, which has `scalar` dense
// numbers: the largest first, of equal ones the first. `pick` writes the numbers of such a row at the places
// b[i][j][k]. `mark` writes 1 where k is among the `scalar` places of a row of a, else 0. `fill` writes `scalar` where
// b is not 0, else a. A load reads dims[2] elements of the token's row in tensor a.at, from element a.stride[0] on; a
// store writes to tensor out.at in the same way.
struct Step {
    Op op;
    Type type;  // of the result: it is rounded to it; of the memory for load and store
    int64_t dims[3];
    View out, a, b;
    bool has_b;
    float scalar;
    const float* matrix = nullptr;  // of a rotation, [dims[1], dims[1]]; the kernel's own
};

// One tensor of a call. The elements of token t are contiguous at data + t * row_bytes.
struct Rows {
    char* data;
    int64_t row_bytes;
};

class FusedKernel {
  public:
    // Throws std::invalid_argument for steps that leave the scratch memory or the tensors, and for an unknown `isa`.
    // setup: Steps that run once per call and thread. body: Steps that run once per token.
    FusedKernel(std::vector<Step> setup, std::vector<Step> body, int64_t scratch, int tensors, const std::string& isa);

    // Runs tokens first .. end - 1 on the calling thread.
    void run(int64_t first, int64_t end, const Rows* tensors) const;

    int tensors() const { return tensors_; }

  private:
    void check(const Step& step) const;

    std::vector<Step> setup_, body_;
    std::vector<std::shared_ptr<const std::vector<float>>> matrices_;  // of rotations
    int64_t scratch_;
    int tensors_;
    const struct KernelTable* table_;
};

}  // namespace hpcdecode::ops
