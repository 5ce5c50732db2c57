// The arguments of an instruction set's kernel of recurrent layers. Plain data only, as in kernel_api.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "types.h"

namespace hpcdecode {

constexpr int kMaxRecurTokens = 32;  // tokens of a sequence whose inputs are prepared together

// A recurrent layer. RecurrentShape says what the numbers mean; channels are those of q, k and v, in this order.
//
// The state of a layer has k_dim rows of v_dim columns for each head. A vector of the ISA has `width` floats. Numbers
// of a state are float32, or bfloat16: then they are rounded after every token, and all arithmetic is in float32.
// - Layers of heads (v_dim > 1): v_dim is padded to vectors, in blocks of up to four of them, all about as large:
//   [head][block][k_dim][columns of the block].
// - Compressors (compress_rate > 0): always float32, [1, or 3 means][3][channels padded to vectors].
// - Layers of lanes (v_dim = 1): heads that share a k head are padded to vectors: [k head][vector][k_dim][width].
struct RecurLayer {
    int heads, k_heads, k_dim, v_dim, taps, decay_dim, compress_rate;
    bool silu, delta, normalised, has_beta, has_rate, overlaps;
    float scale;
    int64_t channels;
    const float* conv_weight;  // [taps][channels], or null
    const float* conv_bias;    // [channels], or null
    const float* rate;         // [heads][decay_dim]; of lanes [k head][vector][decay_dim][width]; or null
    const float* skip;         // [heads], or null
};

// Some tokens of one sequence through some heads of a layer.
struct RecurArgs {
    const RecurLayer* layer;
    int first_head, last_head;  // of lanes: first_head begins a vector
    const void* rows;           // of the tokens, all columns
    void* out;                  // of the tokens, all columns
    ActType type;               // of rows, out and window
    ActType state_type;
    int64_t stride, out_stride;  // elements between tokens
    int64_t position;            // of the first of `rows` in its sequence
    int64_t first, end;          // of `rows`, those to take; tokens before `first` have been taken
    const void* window;          // rows of the tokens before `rows`: that of position p in row p % window_rows
    int64_t window_rows, window_stride;
    void* state;     // of the sequence and layer, 64-byte aligned
    float* scratch;  // 64-byte aligned, `scratch_floats` of them
    int tokens;      // that are prepared together: 1 to kMaxRecurTokens
};

struct RecurKernel {
    int width;
    void (*run)(const RecurArgs&);
    // Returns the scratch of any `heads` neighbouring heads.
    int64_t (*scratch_floats)(const RecurLayer&, int heads, int tokens);
};

}  // namespace hpcdecode
