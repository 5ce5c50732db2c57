// Packs weights in blocks as they are, in the panels that GEMMs read; weight_form.h describes them. Blocks are those of
// GGUF files (ggml), and some of our own for the weights of other checkpoints.
#pragma once
#include <cstdint>
#include <vector>

#include "weight_form.h"

namespace hpcdecode::ops {

// Blocks of 32 inputs; of 64 of nf4, of 256 of q*_k and iq4_xs. These are our own:
// nf4: float32 scale; codes, two a byte, the first in its upper half.
// nvfp4: float32 scale, FP8 scales [2]; codes, two a byte, the first in its lower half.
// i8: float32 scale, which four blocks in a row share; int8 [32].
// f8: the same with FP8 [32].
// i4: float16 scale and zero; codes as nvfp4's.
// mx4, mx8: exponent + 127, a byte; codes as nvfp4's, or FP8 [32]. Exponents that the form has not are brought into its
// range, and the numbers rounded.
enum class BlockType : int {
    q4_0,
    q4_1,
    q5_0,
    q8_0,
    q4_k,
    q5_k,
    q6_k,
    nf4,
    nvfp4,
    i8,
    q2_k,
    q3_k,
    iq4_nl,
    iq4_xs,
    q5_1,
    mxfp4,
    i4,
    f8,
    mx4,
    mx8
};

// What a weight in these blocks becomes.
constexpr WeightForm form_of(BlockType type) {
    switch (type) {
        case BlockType::q4_0:
        case BlockType::i4:
            return WeightForm::int4;
        case BlockType::mxfp4:
        case BlockType::mx4:
            return WeightForm::mxfp4;
        case BlockType::mx8:
            return WeightForm::mxfp8;
        case BlockType::f8:
            return WeightForm::fp8;
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
        case BlockType::nf4:
            return WeightForm::nf4;
        case BlockType::nvfp4:
            return WeightForm::nvfp4;
        case BlockType::i8:
            return WeightForm::i8;
        case BlockType::q2_k:
            return WeightForm::q2_k;
        case BlockType::q3_k:
            return WeightForm::q3_k;
        case BlockType::iq4_nl:
            return WeightForm::iq4_nl;
        case BlockType::iq4_xs:
            return WeightForm::iq4_xs;
        case BlockType::q5_1:
            return WeightForm::q5_1;
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
