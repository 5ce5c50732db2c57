// The shapes of a model's attention layers.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "types.h"

namespace hpcdecode {

constexpr int kDefaultBlockTokens = 64;

// Numbers that are added to scores, before the softmax, by the distance between a query and a key: the products of
// `dim` numbers that a token brings for every query head and of as many profiles over the distances below `extent`.
// Longer distances have none. With an extent of 0 every profile is minus the distance, without end (ALiBi).
struct PositionBias {
    int dim = 0;
    int64_t extent = 0;
    // Profiles with the largest distance first, [dim][stride()], with zeros at both ends, so that kernels may read all
    // of a chunk. By values, since shapes are copied.
    std::shared_ptr<const std::vector<float>> profiles;

    // profiles: [dim][extent], the smallest distance first; none for an extent of 0.
    static PositionBias of(int dim, const std::vector<float>& profiles);
    int64_t stride() const { return kMargin + extent + kMargin; }
    // Of the largest distance.
    const float* first() const { return profiles->data() + kMargin; }
    static constexpr int64_t kMargin = 64;
};

struct LayerShape {
    int kv_heads, k_dim, v_dim, q_heads;
    float scale;
    Window window;
    float softcap;  // 0: none
    bool sinks;
    bool latent = false;  // the values are the first v_dim elements of K
    // An indexer chooses the index_topk earlier tokens that a token attends to, by index_heads queries of index_dim
    // elements and an index key of each token. Without heads, those that the layer before chose. index_topk 0: all.
    int index_heads = 0, index_dim = 0;
    int64_t index_topk = 0;
    // One compressed entry is made of so many tokens; 0: none. A token attends to its window and to the entries of all
    // tokens that came, or to index_topk of them: index keys are those of entries then.
    int64_t compress_rate = 0;
    // Tokens that are chosen together, as pools, by the index key of the last one. Those behind the last whole pool are
    // attended to as well. index_topk is whole pools.
    int64_t index_pool = 1;
    // If positive, pools are blocks that hold the positions from a multiple of index_pool on, and every token has an
    // index key. Each KV head attends to the last index_local blocks, that of the token included, and to others that
    // the index head of its number chooses by the largest q.k of their tokens; there are no head weights.
    int64_t index_local = 0;
    PositionBias bias{};
    bool row_sinks = false;  // a token brings a sink for each of its query heads
    int group() const { return q_heads / kv_heads; }
    bool has_entries() const { return compress_rate > 0; }
    bool chooses() const { return index_topk > 0 || has_entries(); }
    bool has_indexer() const { return index_heads > 0; }
    bool has_blocks() const { return index_local > 0; }
    bool has_pools() const { return index_pool > 1 && !has_blocks(); }
    int choices() const { return has_blocks() ? kv_heads : 1; }  // of a token
    int64_t bias_column() const {
        return int64_t{q_heads} * k_dim;
    }  // of [q | bias | sinks | index q | weights | k ...]
    int64_t sink_column() const { return bias_column() + int64_t{q_heads} * bias.dim; }
    int64_t index_q_column() const { return sink_column() + (row_sinks ? q_heads : 0); }
    int64_t index_weight_column() const { return index_q_column() + int64_t{index_heads} * index_dim; }
    int64_t q_columns() const { return index_weight_column() + (has_blocks() ? 0 : index_heads); }
    int64_t entry_column() const { return int64_t{kv_heads} * k_dim; }  // of a [k | entry | index key | v] row
    int64_t index_k_column() const { return entry_column() + (has_entries() ? k_dim : 0); }
    int64_t v_column() const { return index_k_column() + index_dim; }
    int64_t kv_columns() const { return v_column() + (latent ? 0 : int64_t{kv_heads} * v_dim); }
    int64_t row_columns() const { return q_columns() + kv_columns(); }
    int64_t out_columns() const { return int64_t{q_heads} * v_dim; }
};

// All throw std::invalid_argument for values that make no sense.
KvType parse_kv_type(const std::string& name);
void check_block_tokens(int block_tokens);
int default_block_tokens(const std::vector<LayerShape>& layers);  // whole pools of all layers, where that is possible
void check_shapes(const std::vector<LayerShape>& layers, int block_tokens);

}  // namespace hpcdecode
