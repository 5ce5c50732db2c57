// Cuts a call of a state store into items. The cut decides which thread computes an item, never a result.
#pragma once
#include <cstdint>
#include <vector>

#include "state_slots.h"

namespace hpcdecode {

// Some tokens of one sequence.
struct SequenceRun {
    int slot, node;
    int64_t count, first_token;  // first_token: row of the call's matrices
    int64_t held;                // tokens that it saw before and that are not in the state yet

    int64_t tokens() const { return held + count; }  // that go through the state
};

// Sequences of a node with as many tokens each, whose heads are cut alike. The first part of all sequences comes first,
// then the second, so that the weights of its heads stay in cache.
struct RunGroup {
    int64_t first_sequence, sequences;
    int heads_per_part;
    int64_t first_item;
};

// Some neighbouring heads of one sequence.
struct RecurItem {
    const SequenceRun* sequence;
    int first_head, heads;
};

// What the cut depends on.
struct RecurCost {
    int heads;
    int unit;              // heads that should stay together, because they share what they are given
    int least;             // heads that must stay together
    int64_t of_head;       // work of a head and token, in floats of state or as much
    int64_t state_floats;  // of a head
};

struct RecurPlan {
    std::vector<SequenceRun> sequences;  // by node, longest first
    std::vector<RunGroup> groups;
    std::vector<int64_t> node_sequences, node_items;  // bounds of the nodes' shares: [nodes + 1]
    int64_t items, work;                              // work: in floats, as RecurCost

    void make(const StateSlots& slots, int layer, const RecurCost& cost, const int32_t* numbers, const int32_t* counts,
              int n, int threads);
    RecurItem find(int64_t item) const;

  private:
    int heads_per_part(const RecurCost& cost, int64_t count, int threads) const;

    int heads_ = 0;  // of the layer
};

}  // namespace hpcdecode
