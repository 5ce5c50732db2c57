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
    HeadLayout index;         // of the indexer's keys, as keys of one head; nothing without an indexer
    size_t index_at;          // of them in a block
};

HeadLayout head_layout(const LayerShape& shape, KvType type, int block_tokens);

// Returns how an indexer's keys are stored beside K and V of a type: in two bytes at least, as they decide what is
// read.
KvType index_type(KvType type);

// Throws std::invalid_argument for shapes that make no sense.
std::vector<LayerLayout> lay_out(const std::vector<LayerShape>& layers, KvType type, int block_tokens);
size_t bytes_per_block(const std::vector<LayerLayout>& layers);

}  // namespace hpcdecode
