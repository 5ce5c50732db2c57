// What attention of a layer would take, without K and V: its items are cut as those of a region are, and threads take
// them as those of a region do.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "layout.h"
#include "region.h"

namespace hpcdecode {

// The attention of a layer, and what it takes a thread.
struct RegionLoad {
    LayerShape shape;
    KvType kv_type;
    int block_tokens, threads;
    std::vector<int64_t> lengths;                     // of sequences that decode, their new tokens included
    std::vector<std::pair<int64_t, int64_t>> chunks;  // first token and tokens of chunks of prompts
    double seconds_per_byte, seconds_per_product;     // of attention of sequences, and of prompts
    double seconds_per_token;                         // and KV head that is packed or appended
    bool together;  // in one region; else what is appended, sequences, and prompts follow each other
};

struct PlayedItem {
    WorkKind kind;
    int thread;
    double begin, end;  // seconds
};

// Throws std::invalid_argument for lengths or numbers that make no sense.
std::vector<PlayedItem> play_region(const RegionLoad& load);

}  // namespace hpcdecode
