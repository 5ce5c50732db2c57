// Quantises a weight to few bits and packs it in the panels that GEMMs read; weight_form.h describes them.
#pragma once
#include <cstdint>
#include <vector>

#include "fused_kernel.h"
#include "packed_weights.h"
#include "weight_form.h"

namespace hpcdecode::ops {

// What is packed: rows of `inputs` numbers of `type`, float32 or bfloat16.
struct Quantising {
    std::vector<const char*> rows;  // of all outputs, in order
    Type type;
    int64_t inputs;
    WeightForm form;
};

// Rounds numbers to the nearest codes, on up to `threads` threads of the process's OpenMP team.
// bias: What panels begin with, one float32 per output.
// out: The panels, zeros so far.
void pack_few_bits(const Quantising& weight, const float* bias, char* out, int threads);

}  // namespace hpcdecode::ops
