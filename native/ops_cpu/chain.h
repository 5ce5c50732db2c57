// Token programs and products one after the other, a block of tokens at a time: what a block hands on stays in cache.
//
// Threads form groups, which take block after block; the threads of a group divide a program's tokens and a product's
// outputs between them and wait for each other after every stage.
#pragma once
#include <cstdint>
#include <variant>
#include <vector>

#include "product.h"
#include "program.h"

namespace hpcdecode::ops {

// tensors: the numbers of a program's, or those of x, weight and result of a product.
struct Stage {
    std::variant<Program, Product> work;
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

    // Runs tokens 0 .. tokens - 1 on up to `threads` threads of the process's OpenMP team.
    void run(int64_t tokens, int threads, const std::vector<Rows>& given) const;

    int given() const { return given_; }

  private:
    struct Call;
    struct Group;

    int groups(int64_t tokens, int threads) const;
    void join_group(Call call, int thread, int threads) const;
    void take_blocks(const Call& call, Group& group, int member, int members) const;
    void run_block(const Call& call, Group& group, int64_t block, int member, int members) const;
    const char* next_weights(const Rows* tensors, size_t stage, int member, int members) const;

    std::vector<Stage> stages_;
    int given_;
    std::vector<Passed> passed_;
    int64_t passed_bytes_ = 0;  // a token
    bool multiplies_ = false;
};

}  // namespace hpcdecode::ops
