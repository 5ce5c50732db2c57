// Packs weights in the panels that GEMMs read; product.h describes them.
#pragma once
#include <cstdint>
#include <vector>

namespace hpcdecode::ops {

// Rows of a weight, one per output.
struct WeightRows {
    const char* data;
    int64_t row_bytes, count;
};

// Returns the panels of that many outputs.
int64_t panels_of(int64_t outputs);

// Returns pointers to all rows, `in_turn` of each part before those of the next part.
std::vector<const char*> rows_of(const std::vector<WeightRows>& parts, int64_t in_turn);

// Packs the rows of all `parts`, `words` words each, on up to `threads` threads of the process's OpenMP team.
// heads: What panels begin with, one word per output.
// in_turn: Rows that each part gives before the next part does.
// out: The panels, zeros so far.
void pack_weights(const std::vector<WeightRows>& parts, const std::vector<const uint32_t*>& heads, int64_t words,
                  int64_t in_turn, uint32_t* out, int threads);

}  // namespace hpcdecode::ops
