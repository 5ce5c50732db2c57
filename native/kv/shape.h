// The shapes of a model's attention layers.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "types.h"

namespace hpcdecode {

constexpr int kDefaultBlockTokens = 64;

struct LayerShape {
    int kv_heads, k_dim, v_dim, q_heads;
    float scale;
    int64_t window;  // 0: none
    float softcap;   // 0: none
    bool sinks;
    bool latent = false;  // the values are the first v_dim elements of K
    int group() const { return q_heads / kv_heads; }
    int64_t q_columns() const { return int64_t{q_heads} * k_dim; }
    int64_t kv_columns() const { return int64_t{kv_heads} * (latent ? k_dim : k_dim + v_dim); }
    int64_t row_columns() const { return q_columns() + kv_columns(); }
    int64_t out_columns() const { return int64_t{q_heads} * v_dim; }
};

// All throw std::invalid_argument for values that make no sense.
KvType parse_kv_type(const std::string& name);
void check_block_tokens(int block_tokens);
void check_shapes(const std::vector<LayerShape>& layers, int block_tokens);

}  // namespace hpcdecode
