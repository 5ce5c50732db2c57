// How a block keeps the keys and values of a model's attention layers.
#pragma once
#include <vector>

#include "kernel_api.h"
#include "shape.h"

namespace hpcdecode {

struct LayerLayout {
    LayerShape shape;
    HeadLayout head;
    size_t block_bytes;       // all KV heads of one block
    size_t offset;            // of block 0 in the arena
    double token_head_bytes;  // stored bytes of one token and KV head
};

HeadLayout head_layout(const LayerShape& shape, KvType type, int block_tokens);

// Throws std::invalid_argument for shapes that make no sense.
std::vector<LayerLayout> lay_out(const std::vector<LayerShape>& layers, KvType type, int block_tokens);
size_t bytes_per_block(const std::vector<LayerLayout>& layers);

}  // namespace hpcdecode
