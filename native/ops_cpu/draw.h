// One random token a row of logits, of those that min_p, top_k and top_p leave, in this order (as vLLM's V1 sampler).
//
// A token's weight is exp((logit - largest) / temperature). min_p leaves weights of at least min_p; top_k those of at
// least the k-th largest; top_p, going by falling weight and then by token, those before which less than its share of
// what is left lies. The token drawn is the one, by token id, at which the running sum of what is left passes
// `uniform` of its total. Nothing of a row depends on the others, nor on the threads.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "program.h"

namespace hpcdecode::ops {

struct Draw {
    float temperature;  // > 0
    float min_p;        // 0: all
    int64_t top_k;      // 0: all
    float top_p;        // 1: all
    double uniform;     // in (0, 1)
};

// Row i of `draws` is row rows[i] of `logits`, `vocabulary` numbers of `type`; -inf is never drawn. A row without a
// finite largest logit gives its first largest. Throws std::invalid_argument for an unknown instruction set.
std::vector<int64_t> draw(const Rows& logits, Type type, int64_t vocabulary, const std::vector<int64_t>& rows,
                          const std::vector<Draw>& draws, int threads, const std::string& isa);

}  // namespace hpcdecode::ops
