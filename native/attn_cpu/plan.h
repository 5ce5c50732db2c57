// Cuts an attend call into items. The cut decides which thread computes an item, never a result.
#pragma once
#include <cstdint>
#include <vector>

#include "block_pool.h"
#include "choice.h"

namespace hpcdecode {

// An item is some neighbouring KV heads over a segment of the pieces, for one block of query rows. Heads stay together
// if they can, because a block holds them side by side and straight lines of memory are read fastest.
struct SequencePlan {
    int slot, node;
    int64_t length, count, first_token;  // first_token: row of the call's matrices
    int64_t piece_begin, pieces;
    int segments;
    int64_t segment_pieces;
    int heads_per_item, head_items, row_blocks;
    int64_t item_bytes;
    bool write_first;        // new tokens are appended before any item runs
    bool written = false;    // they are appended already
    const int32_t* chosen;   // what was chosen for the only new token (see Choice), or null for all positions
    int64_t chosen_of_head;  // between the choices of KV heads; 0: one for all
    int64_t first_item;
    int64_t first_pending;  // counters of unfinished segments, one a run of heads
    int64_t first_partial;  // floats
    int64_t partials() const {
        return 1 + pieces - segment_pieces;
    }  // of one head, folded first segment and single pieces
    int64_t items() const { return int64_t{row_blocks} * head_items * segments; }
};

struct AttendPlan {
    std::vector<SequencePlan> sequences;              // by node, those with longer items first
    std::vector<int64_t> node_sequences, node_items;  // bounds of the nodes' shares: [nodes + 1]
    int64_t items, pending, partial_floats, bytes;
    bool write_first;

    void make(const BlockPool& pool, int layer, const int32_t* slots, const int32_t* counts, int n, int threads);
    // Cuts the attention of every query to what was chosen for it; rows are written already.
    void make_chosen(const BlockPool& pool, int layer, const std::vector<Query>& queries,
                     const std::vector<Choice>& choices, int threads);
    // Cuts what sequences of such lengths would take that have one new token each, on one NUMA node.
    void make(const LayerLayout& layer, const std::vector<int64_t>& lengths, int threads);
    const SequencePlan& find(int64_t item) const;

  private:
    void clear();
    void add(const LayerLayout& layer, SequencePlan s);
    void cut_all(const LayerLayout& layer, int nodes, int threads);
    void cut(SequencePlan& s, const LayerLayout& layer, int64_t bytes_per_head, int threads) const;
};

}  // namespace hpcdecode
