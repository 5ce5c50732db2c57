// Attention over latents: forms, arguments and launches. A latent layer has one KV head for all query heads, and its
// values are the first columns of K.
#pragma once
#include "kernel_api.h"

namespace hpcdecode {

// As for other layers, arithmetic depends on absolute positions alone. A piece of 1024 tokens has a partial result,
// unless it is all that a query row sees.
constexpr int kLatentPiece = 1024;
constexpr int kLatentThreads = 256;
constexpr int kMaxLatentVDim = 512;

// How a block attends.
struct LatentForm {
    int rows;    // query rows that share a read of the latents; 0: there is no room
    int tile;    // tokens that are scored together
    int parts;   // 2: queries and weights are sums of two numbers of 16 bits each
    int stages;  // tiles in shared memory
    int smem;    // bytes
};

// Returns the form that reads latents least often in `limit` bytes of shared memory. act: Of queries.
LatentForm latent_form(const LayerArgs& layer, KvType type, ActType act, size_t limit);

struct LatentArgs {
    BatchArgs batch;
    LayerArgs layer;
    LatentForm form;
    RowsArgs q;
    const float* sinks;  // [group] or null
    float* partials;     // [items][form.rows][2 + v_pad]: (m, sum, weighted values) for weights relative to 2^m
    void* out;
    ActType type;
    int64_t stride;  // elements
};

// Both throw std::runtime_error if the device refuses. The second merges the rows that see several pieces.
void launch_latent(const LatentArgs& args, KvType type, void* stream);
void launch_latent_merge(const LatentArgs& args, void* stream);

}  // namespace hpcdecode
