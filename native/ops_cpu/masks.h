// What grammars leave of logits.
#pragma once
#include <cstdint>
#include <vector>

#include "fused_kernel.h"

namespace hpcdecode::ops {

// Sets the logits of tokens that are not allowed to -inf. Where all that are allowed are -inf already, they become 0.
// logits: Rows of `vocabulary` float32.
// rows: Index of each row that has a mask.
// masks: `words` words for each of `rows`; bit i % 32 of word i / 32 allows token i. Throws std::invalid_argument if
//   they are of fewer tokens than logits.
void keep_allowed(const Rows& logits, int64_t vocabulary, const std::vector<int64_t>& rows, const uint32_t* masks,
                  int64_t words, int threads);

}  // namespace hpcdecode::ops
