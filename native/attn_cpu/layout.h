// How a block keeps the keys and values of a model's attention layers.
#pragma once
#include <algorithm>
#include <vector>

#include "kernel_api.h"
#include "layer_groups.h"
#include "shape.h"

namespace hpcdecode {

struct LayerLayout {
    LayerShape shape;
    HeadLayout head;
    size_t kv_bytes;          // all KV heads of one block
    size_t block_bytes;       // with its index keys
    size_t offset;            // of block 0 in the arena
    size_t stride;            // from block to block
    int group;                // of layers with blocks of their own
    double token_head_bytes;  // stored bytes of one token and KV head
    HeadLayout index;         // of the indexer's keys, as keys of one head; nothing without an indexer
    size_t index_offset;      // of those of block 0 in the arena
    size_t index_stride;
    int block_tokens;  // a row for each lies in a block; behind them
    int entries;       // rows for compressed entries

    // Returns the number of a row in a sequence's blocks.
    int64_t row_of_token(int64_t position) const {
        return position / block_tokens * (block_tokens + entries) + position % block_tokens;
    }
    int64_t row_of_entry(int64_t entry) const {
        const int64_t last = (entry + 1) * shape.compress_rate - 1;  // its last token, in whose block it is
        return last / block_tokens * (block_tokens + entries) + block_tokens + entry % entries;
    }
    // Returns what an indexer chooses from, of a sequence of `length` tokens: entries, or pools of tokens.
    int64_t choosable(int64_t length) const {
        if (shape.has_blocks()) return std::max<int64_t>((length - 1) / shape.index_pool + 1 - shape.index_local, 0);
        return length / (entries > 0 ? shape.compress_rate : shape.index_pool);
    }
    int64_t most_chosen() const { return shape.index_topk / shape.index_pool; }
    // Returns how many index keys have a score: those of entries or pools, or of all tokens of blocks.
    int64_t scored(int64_t length) const { return choosable(length) * (shape.has_blocks() ? shape.index_pool : 1); }
    // Returns whether not all of these are chosen.
    bool chooses(int64_t length) const { return shape.index_topk > 0 && choosable(length) > most_chosen(); }
    // Returns how many of these tokens, or of its entries and the tokens of its window, the last one attends to.
    int64_t attended(int64_t length) const {
        if (entries == 0) return length - (chooses(length) ? choosable(length) - most_chosen() : 0) * shape.index_pool;
        return (chooses(length) ? most_chosen() : choosable(length)) + length - shape.window.first(length);
    }
    // Returns of how many tokens, side by side in a run, a choice has the first one.
    int64_t listed_tokens() const { return head.by_rows ? 1 : head.run_tokens; }
};

HeadLayout head_layout(const LayerShape& shape, KvType type, int block_tokens);

// Returns how an indexer's keys are stored beside K and V of a type: in two bytes at least, as they decide what is
// read.
KvType index_type(KvType type);

// Throws std::invalid_argument for shapes that make no sense.
std::vector<LayerLayout> lay_out(const std::vector<LayerShape>& layers, KvType type, int block_tokens);
size_t bytes_per_block(const std::vector<LayerLayout>& layers);

LayerGroups group_layers(const std::vector<LayerLayout>& layers);

}  // namespace hpcdecode
