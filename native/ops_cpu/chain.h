// Token programs and products one after the other, a block of tokens at a time: what a block hands on stays in cache.
//
// A chain may go through attentions, too: then a block's tokens are not neighbours, so that long and short sequences
// come to all blocks alike. Threads form groups, which take block after block; the threads of a group divide a
// program's tokens and a product's outputs between them and wait for each other after every stage.
#pragma once
#include <cstdint>
#include <variant>
#include <vector>

#include "product.h"
#include "program.h"
#include "row_attention.h"

namespace hpcdecode::ops {

// The attention of a layer: of the tensors qkv, and out.
struct Attention {
    int layer;
};

// tensors: the numbers of a program's, those of x, weight and result of a product, or those of an attention.
struct Stage {
    std::variant<Program, Product, Attention> work;
    std::vector<int> tensors;
};

// Rows that one stage hands to a later one: `bytes` a token, of a block's memory from `at` times its tokens on.
struct Passed {
    int64_t bytes, at;
};

class Chain {
  public:
    // Tensors 0 .. given - 1 are those of the call, after them come the `passed`. Throws std::invalid_argument.
    Chain(std::vector<Stage> stages, int given, std::vector<Passed> passed);

    // Runs tokens 0 .. tokens - 1 on up to `threads` threads of the process's OpenMP team. `attention`: of the step
    // that the tokens are, if there is any in the chain.
    void run(int64_t tokens, int threads, const std::vector<Rows>& given, RowAttention* attention) const;

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
    int64_t passed_bytes_ = 0;  // a token
    bool multiplies_ = false, attends_ = false;
};

}  // namespace hpcdecode::ops
