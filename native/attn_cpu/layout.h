// Shapes of a model's attention layers, and where their keys and values lie in a block.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernel_api.h"

namespace hpcdecode {

struct LayerShape {
    int kv_heads, k_dim, v_dim, q_heads;
    float scale;
    int64_t window;  // 0: none
    float softcap;   // 0: none
    bool sinks;
    int group() const { return q_heads / kv_heads; }
};

struct LayerLayout {
    LayerShape shape;
    HeadLayout head;
    size_t block_bytes;       // all KV heads of one block
    size_t offset;            // of block 0 in the arena
    double token_head_bytes;  // stored bytes of one token and KV head
};

KvType parse_kv_type(const std::string& name);  // throws std::invalid_argument
HeadLayout head_layout(const LayerShape& shape, KvType type, int block_tokens);
int default_block_tokens(KvType type);

// Throws std::invalid_argument for shapes that make no sense.
std::vector<LayerLayout> lay_out(const std::vector<LayerShape>& layers, KvType type, int block_tokens);
size_t bytes_per_block(const std::vector<LayerLayout>& layers);

}  // namespace hpcdecode
