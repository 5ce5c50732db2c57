// Weights into the panels that products read; product.h says what these are.
#pragma once
#include <cstdint>
#include <vector>

namespace hpcdecode::ops {

// Rows of a weight, one an output.
struct WeightRows {
    const char* data;
    int64_t row_bytes, count;
};

// Fills `out`, zeros so far, with the panels of the rows of all `parts`, `words` words each, on up to `threads` threads
// of the process's OpenMP team. heads: what panels begin with, a word for every output. in_turn: rows that each part
// gives before the next one does.
void fill_panels(const std::vector<WeightRows>& parts, const std::vector<const uint32_t*>& heads, int64_t words,
                 int64_t in_turn, uint32_t* out, int threads);

}  // namespace hpcdecode::ops
