// Which sequence holds which place of a state store.
//
// A place has room for the state of one sequence. Every NUMA node has a range of the places. The lowest free place of
// the node with the most is taken first, so that open sequences lie side by side and share huge pages.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hpcdecode {

class StateSlots {
  public:
    // bounds: First place of every node, and the number of places, [nodes + 1]. Slots are as many as places.
    // lookahead: Tokens by which a slot may be truncated.
    StateSlots(int max_sequences, size_t layers, std::vector<int64_t> bounds, int lookahead);

    // These throw std::invalid_argument on bad arguments, and then change nothing.
    std::vector<int> extend(const int32_t* slots, const int32_t* counts, int n);  // returns those that it opened
    std::vector<int64_t> release(const int32_t* slots, int n);                    // returns their places
    void fork(int src, int dst);  // opens dst on the node of src, if that has a free place
    void truncate(int slot, int64_t length);
    int64_t length(int slot) const { return opened(slot).length; }
    // Tokens before the last `count` that are not in a layer's state.
    int64_t held(int slot, int layer, int64_t count) const {
        return slots_[slot].length - count - slots_[slot].in_state[layer];
    }
    int droppable(int64_t count) const;  // of so many tokens of a call
    int lookahead() const { return lookahead_; }
    // Checks that `layer` comes next for all slots with their last `counts` tokens. Returns the sum of `counts`.
    int64_t check_run(int layer, const int32_t* slots, const int32_t* counts, int n);
    void count_run(int layer, const int32_t* slots, const int32_t* counts, int n);
    void check() const;  // throws std::logic_error with the equation that does not hold

    int64_t place(int slot) const { return slots_[slot].place; }
    int home(int slot) const { return node_of(slots_[slot].place); }  // NUMA node
    bool is_open(int slot) const { return slots_[slot].open; }
    int max_sequences() const { return static_cast<int>(slots_.size()); }
    int nodes() const { return static_cast<int>(free_.size()); }
    int open_slots() const;

  private:
    struct Slot {
        bool open = false;
        int64_t place = -1, length = 0;
        std::vector<int64_t> done, in_state;  // tokens that every layer has seen; that are in its state
    };

    const Slot& opened(int slot) const;
    void check_slots(const int32_t* slots, int n);  // that they are in range and differ
    int node_of(int64_t place) const;
    int roomiest_node() const;
    int64_t take_place(int node);

    size_t layers_;
    int lookahead_;
    std::vector<int64_t> bounds_;
    std::vector<std::vector<int64_t>> free_;  // of each node, a heap with the lowest on top
    std::vector<Slot> slots_;
    std::vector<bool> seen_;  // by check_slots
};

}  // namespace hpcdecode
