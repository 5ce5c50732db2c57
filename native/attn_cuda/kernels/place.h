// The place of a token in the KV cache.
#pragma once
#include "numbers.h"

namespace hpcdecode {

// One KV head in the block of one token.
struct Place {
    uint8_t* head;
    int in_block;
};

HPC_DEVICE Place place_of(const BatchArgs& batch, const LayerArgs& layer, const SequenceArgs& s, int head,
                          int position) {
    const HeadLayout& h = layer.head;
    const int64_t block = batch.blocks[s.first_block + position / h.block_tokens];
    return {layer.base + block * h.block_bytes + head * h.head_bytes, position % h.block_tokens};
}

HPC_DEVICE uint8_t* k_row(const HeadLayout& h, const Place& p) {
    return p.head + static_cast<int64_t>(p.in_block) * h.k_row;
}
HPC_DEVICE uint8_t* v_row(const HeadLayout& h, const Place& p) {
    return p.head + h.v_rows + static_cast<int64_t>(p.in_block) * h.v_row;
}
HPC_DEVICE uint16_t* scales(const HeadLayout& h, const Place& p) {
    return reinterpret_cast<uint16_t*>(p.head + h.scales) + p.in_block * 2;
}
// The middles of a token: of K if K has one, then of V.
HPC_DEVICE uint16_t* middles(const HeadLayout& h, const Place& p) {
    return reinterpret_cast<uint16_t*>(p.head + h.middles) + p.in_block * (h.k_middle ? 2 : 1);
}

// The positions [low, high) that a query row sees; none for rows that pad a row block.
struct Span {
    int low, high;
};
HPC_DEVICE Span visible(const LayerArgs& layer, const SequenceArgs& s, int row) {
    const int token = row / layer.group;
    if (token >= s.count) return {0, 0};
    const int high = s.length - s.count + token + 1;
    return {static_cast<int>(layer.window.first(high)), high};
}

}  // namespace hpcdecode
