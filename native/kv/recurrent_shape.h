// The shapes of a model's recurrent layers: Gated DeltaNet, KDA, Mamba and short convolutions.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "types.h"

namespace hpcdecode {

// For a token with q, k, v, log decay d and beta, the state S [k_dim][v_dim] of a head becomes
//
//   S = exp(d) * S + k * e^T    e = beta * (v - S'^T k) with the decayed S' if `delta`, else beta * v
//
// and the output is o = S^T q + skip * v. If k_dim is 0 there is no state, and o is v.
//
// A compressor (DeepSeek-V4, section 2.3) has heads of one channel and no q, k: a row is [values | gates], the output
// the mean of the values of the last tokens weighted by the softmax of their gates. Windows of compress_rate tokens
// follow each other; where they overlap, a mean is over the window before, too, for which tokens have values and gates
// of their own, in front of the others.
//
// q, k and v first go through a causal convolution of each channel, then through SiLU, if `taps` and `silu` say so.
struct RecurrentShape {
    int heads, k_heads;  // of v; of q and k: head h uses k head h / group()
    int k_dim, v_dim;
    int taps;  // of the convolution; 0: none
    bool silu, delta;
    bool normalised;  // q and k of a head are divided by their 2-norms
    float scale;      // factor of q
    int decay_dim;    // decays of a head: 1, or k_dim
    bool has_beta;
    bool has_rate;          // the log decay is beta * rate; else it is in the rows
    int compress_rate = 0;  // of a compressor; else 0
    bool overlaps = false;  // its windows do

    int group() const { return heads / k_heads; }
    int64_t k_columns() const { return int64_t{k_heads} * k_dim; }
    int64_t out_columns() const { return int64_t{heads} * v_dim; }
    int64_t channels() const { return 2 * k_columns() + out_columns() * (overlaps ? 2 : 1); }
    int64_t decays() const {  // float32 of a row, gates too
        if (compress_rate > 0) return channels();
        return k_dim > 0 && !has_rate ? int64_t{heads} * decay_dim : 0;
    }
    int64_t betas() const { return has_beta ? heads : 0; }  // float32 of a row
    // Returns the columns of a row [q | k | v | decays | betas]: a float32 takes two of bfloat16.
    int64_t row_columns(ActType type) const {
        return channels() + (decays() + betas()) * (type == ActType::kF32 ? 1 : 2);
    }
};

// Throws std::invalid_argument for a shape that makes no sense.
void check_recurrent(const RecurrentShape& shape);

// The numbers of one layer; empty where the shape has none.
struct RecurrentWeights {
    std::vector<float> conv_weight;  // [channels, taps]
    std::vector<float> conv_bias;    // [channels], may be empty
    std::vector<float> rate;         // [heads * decay_dim]
    std::vector<float> skip;         // [heads], may be empty
};

// Throws std::invalid_argument unless the weights fit the shape. name: Of the layer, for messages.
void check_weights(const RecurrentShape& shape, const RecurrentWeights& weights, const std::string& name);

}  // namespace hpcdecode
