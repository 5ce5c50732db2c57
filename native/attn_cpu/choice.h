// The tokens that sequences attend to where indexers choose them (DeepSeek-V3.2, section 2.1), and the compressed
// entries (DeepSeek-V4, section 2.3).
#pragma once
#include <cstdint>
#include <vector>

#include "block_table.h"
#include "layout.h"

namespace hpcdecode {

// What the indexer of a layer chose for the new tokens of a slot; layers after it may attend to the same.
struct Choice {
    int64_t length = -1, count = 0;  // of the slot, and its new tokens, in that call
    int64_t lists = 1;               // of a new token: one, or one for each KV head
    int64_t stride = 0;
    // [count][lists][stride]: positions, ascending; unset for a token that sees no more than are chosen. Where these
    // lie in runs, the first one of each run. Or rows of blocks where layers have entries, set for all tokens.
    std::vector<int32_t> positions;

    const int32_t* of(int64_t place) const { return positions.data() + place * lists * stride; }
    int32_t* list(int64_t place, int64_t i) { return positions.data() + (place * lists + i) * stride; }
};

// A new token of a call.
struct Query {
    int32_t slot;
    int64_t token;   // row of the call's matrices
    int64_t place;   // among the new tokens of the slot
    int64_t length;  // positions that it sees, its own included
};

std::vector<Query> queries_of(const BlockTable& table, const int32_t* slots, const int32_t* counts, int n);

// Writes the positions of the `count` largest of `length` scores, in order; of equal ones the first. room: Is
// overwritten.
void choose(const float* scores, int64_t length, int64_t count, int32_t* chosen, std::vector<uint32_t>& room);

// Returns the bytes that ScoreItem::carve_scratch takes.
size_t index_scratch_bytes(const LayerLayout& layer);

}  // namespace hpcdecode
