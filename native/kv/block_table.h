// The block table of a paged KV cache: which sequence holds which blocks.
//
// A block id stands for block_tokens positions in every layer. The owner of the table decides where blocks lie in
// memory. Every NUMA node has a range of the blocks; a device counts as one node. A sequence takes blocks of one node,
// its home, until that node has none left. Where K and V lie on disk (see placed_pages.h) ranges of blocks that move
// together take the place of nodes; sequences fill some of them before they begin others.
//
// Layers may be in groups. Then a block stands for positions in the layers of one group, all groups take theirs from
// the same blocks, and of a group with a window a sequence holds only the blocks with what its last position sees, or
// saw `lookahead` positions ago. So it can be truncated by as many.
#pragma once
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "types.h"

namespace hpcdecode {

// Blocks leave a window when all of its positions up to a multiple of this have left it: kernels score so many
// together.
constexpr int64_t kWindowStep = 64;

struct CapacityError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class BlockTable {
  public:
    using Copy = std::pair<int32_t, int32_t>;  // block to block

    // bounds: First block of every node, and the number of blocks, [nodes + 1].
    // fills: Whether new sequences go where others are, while there is room.
    // groups: Window of each group of layers, none if they keep all; equal ones follow each other.
    // lookahead: Positions by which sequences may be truncated, whatever left windows.
    BlockTable(int block_tokens, std::vector<int64_t> bounds, int max_sequences, bool fills = false,
               std::vector<Window> groups = {Window{}}, int64_t lookahead = 0);
    static int32_t count_blocks(int64_t capacity_tokens, int block_tokens, int64_t groups = 1);

    // These throw std::invalid_argument on bad arguments, and then change nothing.
    // `extend` also throws CapacityError. It returns the copies that forked blocks need before they are written.
    std::vector<Copy> extend(const int32_t* slots, const int32_t* counts, int n);
    void release(const int32_t* slots, int n);
    void fork(int src, int dst);
    void truncate(int slot, int64_t length);
    int64_t length(int slot) const;
    // Returns a slot's blocks of a group by their place in the sequence; -1 for those that have left its window.
    const std::vector<int32_t>& blocks(int slot, int group = 0) const { return slots_[slot].blocks[group]; }
    // Returns the place of the first block that a sequence of `length` positions, which had no more, holds of a group.
    int64_t first_held(int group, int64_t length) const { return first_seen(group, length - lookahead_); }
    // Returns the place of the first block that a slot holds of a group.
    int64_t first_place(int slot, int group) const { return first_held(group, slots_[slot].reached); }
    // Returns the blocks of all groups that a sequence holds which had no more positions than the slot. Where one is
    // gone there is the first that is held. Checks the slot.
    std::vector<int32_t> held_blocks(int slot) const;
    const std::vector<int32_t>& taken() const { return taken_; }  // by the last `extend`, those to copy to included
    int home(int slot) const { return slots_[slot].home; }        // NUMA node
    int32_t references(int32_t block) const { return references_[block]; }
    void check() const;  // throws std::logic_error with the equation that does not hold

    // Returns the first of a slot's blocks that has some of its last `count` positions, or 0 for all of them.
    int64_t first_block(int slot, int64_t count, bool all) const;
    // These check slots and counts as `check_written` does.
    // Marks the ranges in which slots have blocks, all or those of their last counts[i] positions: [n, nodes].
    void mark_ranges(const int32_t* slots, const int32_t* counts, int n, bool all, uint8_t* marks, int64_t size);
    // Returns the blocks of the last counts[i] positions of slots.
    std::vector<int32_t> written_blocks(const int32_t* slots, const int32_t* counts, int n);
    void mark_used(uint8_t* marks, int64_t size) const;  // [blocks]: 1 for those that slots hold

    // Checks that slots are in range, differ and are long enough, and that no written position is shared.
    // Returns the sum of `counts`.
    int64_t check_written(const int32_t* slots, const int32_t* counts, int n);
    // Throws std::invalid_argument unless slots hold what their last counts[i] positions see at layers of a group.
    void check_seen(int group, const int32_t* slots, const int32_t* counts, int n) const;

    int block_tokens() const { return block_tokens_; }
    int max_sequences() const { return static_cast<int>(slots_.size()); }
    int groups() const { return static_cast<int>(windows_.size()); }
    int32_t block_count() const { return blocks_; }
    int64_t capacity_tokens() const { return tokens_of(blocks_); }
    int64_t free_blocks() const;
    int64_t free_blocks(int node) const { return static_cast<int64_t>(free_[node].size()); }
    int nodes() const { return static_cast<int>(free_.size()); }
    int64_t used_tokens() const { return tokens_of(blocks_ - free_blocks()); }

  private:
    struct Slot {
        bool open = false;
        int home = 0;
        int64_t length = 0;
        int64_t reached = 0;                       // the most positions that it had, by which blocks left windows
        std::vector<std::vector<int32_t>> blocks;  // by group
    };
    struct Left {
        int32_t* place;
        int32_t block;
    };

    int64_t first_seen(int group, int64_t length) const {
        return windows_[group].first(length) / kWindowStep * kWindowStep / block_tokens_;
    }
    const Slot& opened(int slot) const;
    void check_slots(const int32_t* slots, int n);  // that they are in range and differ
    void check_tail(int slot, int64_t count) const;
    static int64_t reached(const Slot& s, int64_t length) { return std::max(s.reached, length); }
    bool copies_tail(const Slot& s, int group, int64_t length) const;
    int64_t missing(const Slot& s, int group, int64_t length) const;
    void drop_from(std::vector<int32_t>& held, size_t place);
    void leave_windows(Slot& s, int64_t length, std::vector<Left>& left);
    void take_back(const std::vector<Left>& left);
    int64_t blocks_for(int64_t tokens) const { return (tokens + block_tokens_ - 1) / block_tokens_; }
    int64_t tokens_of(int64_t blocks) const { return (blocks * block_tokens_ + groups() - 1) / groups(); }
    int roomiest_node() const;
    int new_home() const;
    int node_of(int32_t block) const;
    int32_t take_block(int home);
    void drop_block(int32_t block);

    int block_tokens_;
    int32_t blocks_;
    bool fills_;
    std::vector<Window> windows_;  // of the groups
    int64_t lookahead_;
    std::vector<int64_t> bounds_;             // of the nodes' blocks
    std::vector<std::vector<int32_t>> free_;  // of each node, LIFO
    std::vector<int32_t> references_;
    std::vector<Slot> slots_;
    std::vector<int32_t> taken_;
    std::vector<uint32_t> stamps_;  // last check_slots call that saw a slot
    uint32_t stamp_ = 0;
};

}  // namespace hpcdecode
