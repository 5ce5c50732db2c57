// Fused kernels and GEMMs, one after the other, on a block of tokens at a time, so that what they hand on stays in
// cache.
//
// A chain may contain attentions, too. Then the tokens of a block are not neighbours, so that every block has long and
// short sequences. Threads form groups, and a group takes block after block. The threads of a group divide a fused
// kernel's tokens and a GEMM's outputs, and wait for each other after every stage.
//
// In a chain with GEMMs of experts all threads take all tokens at once, so that every expert's weight is read once.
#pragma once
#include <cstdint>
#include <variant>
#include <vector>

#include "adapters.h"
#include "expert_product.h"
#include "fused_kernel.h"
#include "product.h"
#include "row_attention.h"

namespace hpcdecode::ops {

// The attention of a layer. Its tensors are qkv and out.
struct Attention {
    int layer;
};

// tensors: Numbers of the tensors that a fused kernel names, or of
//   (x, weight, result) of a GEMM, (x, weight, adapters, h, B, result) of one with an update,
//   (x, experts, weight, result) of one of experts, (x, experts, weight, adapters, result) of one of adapters' experts,
//   (x, experts, weight, adapters, h, B, result) of one of experts with an update,
//   (adapters, x, A, h) of an AdapterProduct, (adapters, y, h, B, result) of an AdapterSum, (qkv, out) of an attention.
struct Stage {
    std::variant<FusedKernel, Product, ExpertProduct, AdapterProduct, AdapterSum, Attention> work;
    std::vector<int> tensors;
};

// Rows that one stage hands to a later one: `bytes` per token, in a block's memory from `at` times its tokens on.
// Several tensors may share such rows. Then each begins `inside` bytes behind the begin of a row.
struct Passed {
    int64_t bytes, at, inside = 0;
};

class Chain {
  public:
    // Tensors 0 .. given - 1 are those of the call; `passed` ones are numbered after them. Throws
    // std::invalid_argument.
    Chain(std::vector<Stage> stages, int given, std::vector<Passed> passed);

    // Runs tokens 0 .. tokens - 1 on up to `threads` threads of the process's OpenMP team.
    // attention: Attention of the tokens' step, or null for a chain without.
    void run(int64_t tokens, int threads, const std::vector<Rows>& given, RowAttention* attention) const;

    // Returns whether so many tokens go through as one block, as those must of which a sequence has several.
    bool together(int64_t tokens, int threads) const;

    int given() const { return given_; }

  private:
    struct Call;
    struct Group;
    struct Member;
    class Block;

    int groups(int64_t tokens, int threads) const;
    bool pairs(int64_t tokens, int threads) const;
    void join_group(Call call, int thread, int threads) const;
    void take_blocks(const Call& call, Group& group, const Member& me) const;
    static void run_pair(Block& one, Block& two, RowAttention& attention, int thread);
    const char* next_weights(const Rows* tensors, size_t stage, const Member& me) const;

    std::vector<Stage> stages_;
    int given_;
    std::vector<Passed> passed_;
    int64_t passed_bytes_ = 0;                                     // per token
    int64_t least_, most_;                                         // tokens of a group and of a block
    bool multiplies_ = false, attends_ = false, chooses_ = false;  // chooses_: has GEMMs of experts
};

}  // namespace hpcdecode::ops
