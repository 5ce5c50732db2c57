// Recurrent states on a device: arguments and launches.
#pragma once
#include <cstddef>
#include <cstdint>

#include "block_base.h"
#include "types.h"

namespace hpcdecode {

constexpr int kTokensTogether = 8;      // of a sequence, whose inputs a block prepares together
constexpr int kMostLaneRows = 64;       // k_dim of layers whose heads have one value
constexpr int kMostHeadRows = 256;      // k_dim of other layers
constexpr int kConvolvedTogether = 32;  // tokens of a sequence, by a block

// A layer, as RecurrentShape says, and where it keeps what its sequences have, by place. Numbers of a state are float32
// or bfloat16: then they are rounded after every token. Arithmetic is in float32.
struct StatesLayer {
    int heads, k_heads, k_dim, v_dim, taps, decay_dim;
    bool silu, delta, normalised, has_beta, has_rate, bf16_states;
    float scale;
    int64_t channels;
    const float* convolution;  // [taps][channels]
    const float* bias;         // [channels], or null
    const float* rate;         // [heads][decay_dim]; where heads have one value [decay_dim][heads]
    const float* skip;         // [heads], or null
    float* windows;            // [places][taps - 1][channels], the oldest token first
    void* states;              // [places][heads][k_dim][v_dim]; where heads have one value [places][k_dim][heads]
};

// The tokens of some sequences. Of numbers by sequence there are three rows: places, counts, first rows of the call.
struct StatesArgs {
    StatesLayer layer;
    const int32_t* sequences;  // [3][sequence_count]
    int sequence_count;
    int longest;       // most tokens of a sequence
    const void* rows;  // [q | k | v | decays | betas] of each token
    void* out;
    ActType type;                // of rows and out
    int64_t stride, out_stride;  // elements between rows
    float* inputs;               // what the convolution gives, [tokens][channels]; null: rows as they are
};

// Launches the kernels that take tokens through a layer. Throws std::runtime_error if the device refuses.
void launch_states(const StatesArgs& args, void* stream);

}  // namespace hpcdecode
