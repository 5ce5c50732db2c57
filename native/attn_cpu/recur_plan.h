// Cuts a call of a state store into items. The cut decides which thread computes an item, never a result.
#pragma once
#include <cstdint>
#include <vector>

#include "state_slots.h"

namespace hpcdecode {

// Some tokens of one sequence. An item is some neighbouring heads.
struct SequenceRun {
    int slot, node;
    int64_t count, first_token;  // first_token: row of the call's matrices
    int heads_per_item;
    int64_t first_item, items;
};

// What the cut depends on.
struct RecurCost {
    int heads;
    int unit;              // heads that stay together
    int64_t of_head;       // work of a head and token, in floats of state or as much
    int64_t state_floats;  // of a head
};

struct RecurPlan {
    std::vector<SequenceRun> sequences;               // by node, longest first
    std::vector<int64_t> node_sequences, node_items;  // bounds of the nodes' shares: [nodes + 1]
    int64_t items, work;                              // work: in floats, as RecurCost
    int most_heads;                                   // of an item

    void make(const StateSlots& slots, const RecurCost& cost, const int32_t* numbers, const int32_t* counts, int n,
              int threads);
    const SequenceRun& find(int64_t item) const;

  private:
    int heads_per_item(const RecurCost& cost, int64_t count, int threads) const;
};

}  // namespace hpcdecode
