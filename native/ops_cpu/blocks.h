// Packs weights in the blocks of GGUF files (ggml) as they are, in the panels that GEMMs read; weight_form.h describes
// them.
#pragma once
#include <cstdint>
#include <vector>

#include "weight_form.h"

namespace hpcdecode::ops {

// Blocks of 32 inputs, from q4_k on of 256.
enum class BlockType : int { q4_0, q4_1, q5_0, q8_0, q4_k, q5_k, q6_k };

// What a weight in these blocks becomes.
constexpr WeightForm form_of(BlockType type) {
    switch (type) {
        case BlockType::q4_0:
            return WeightForm::int4;
        case BlockType::q4_1:
            return WeightForm::q4_1;
        case BlockType::q5_0:
        case BlockType::q8_0:
            return WeightForm::q8_0;
        case BlockType::q4_k:
            return WeightForm::q4_k;
        case BlockType::q5_k:
            return WeightForm::q5_k;
        case BlockType::q6_k:
            return WeightForm::q6_k;
    }
    return WeightForm::plain;
}

// What is packed: rows of whole blocks.
struct Blocks {
    std::vector<const char*> rows;  // of all outputs, in order
    int64_t inputs;
    BlockType type;
};

// Packs a weight, on up to `threads` threads of the process's OpenMP team.
// bias: What panels begin with, one float32 per output.
// out: The panels, zeros so far.
void pack_blocks(const Blocks& weight, const float* bias, char* out, int threads);

}  // namespace hpcdecode::ops
