// Draws one token per row of logits. min_p, top_k and top_p apply in this order, as in vLLM's V1 sampler.
//
// A token's weight is exp((logit - largest) / temperature). min_p keeps weights of at least min_p. top_k keeps weights
// of at least the k-th largest. top_p orders tokens by falling weight, then by id; it keeps those before which the sum
// is below its share of the total. Tokens are then added up by id until the sum passes `uniform` of the total: that
// token is drawn. A row's result depends neither on other rows nor on the number of threads.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "fused_kernel.h"

namespace hpcdecode::ops {

struct Draw {
    float temperature;  // > 0
    float min_p;        // 0: all
    int64_t top_k;      // 0: all
    float top_p;        // 1: all
    double uniform;     // in (0, 1)
};

// Draws from row rows[i] of `logits` with the parameters draws[i]. Throws std::invalid_argument for an unknown `isa`.
// A logit of -inf is never drawn. A row without a finite largest logit gives its first largest.
// logits: Rows of `vocabulary` numbers of `type`.
std::vector<int64_t> draw(const Rows& logits, Type type, int64_t vocabulary, const std::vector<int64_t>& rows,
                          const std::vector<Draw>& draws, int threads, const std::string& isa);

}  // namespace hpcdecode::ops
