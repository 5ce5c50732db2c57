#include "block_table.h"

#include <algorithm>
#include <iterator>

#include "shape.h"

namespace hpcdecode {
namespace {

std::string str(int64_t x) { return std::to_string(x); }

[[noreturn]] void invalid(const std::string& what) { throw std::invalid_argument(what); }

void check_marks(int64_t size, int64_t expected) {
    if (size != expected) invalid("marks: expected " + str(expected) + " bytes, got " + str(size));
}

}  // namespace

int32_t BlockTable::count_blocks(int64_t capacity_tokens, int block_tokens, int64_t groups) {
    check_block_tokens(block_tokens);
    if (capacity_tokens < 1) invalid("capacity_tokens: expected at least 1, got " + str(capacity_tokens));
    const int64_t blocks = (capacity_tokens + block_tokens - 1) / block_tokens * groups;
    if (blocks > INT32_MAX) invalid("capacity_tokens: " + str(capacity_tokens) + " needs more than 2^31 blocks");
    return static_cast<int32_t>(blocks);
}

BlockTable::BlockTable(int block_tokens, std::vector<int64_t> bounds, int max_sequences, bool fills,
                       std::vector<Window> groups, int64_t lookahead)
    : block_tokens_(block_tokens),
      blocks_(static_cast<int32_t>(bounds.back())),
      fills_(fills),
      windows_(std::move(groups)),
      lookahead_(lookahead),
      bounds_(std::move(bounds)),
      free_(bounds_.size() - 1) {
    if (lookahead < 0) invalid("lookahead: expected at least 0, got " + str(lookahead));
    if (max_sequences < 1) invalid("max_sequences: expected at least 1, got " + str(max_sequences));
    references_.assign(blocks_, 0);
    slots_.resize(max_sequences);
    for (Slot& s : slots_) s.blocks.resize(windows_.size());
    stamps_.assign(max_sequences, 0);
    for (int i = 0; i < nodes(); ++i) {
        free_[i].reserve(bounds_[i + 1] - bounds_[i]);
        for (int64_t b = bounds_[i + 1]; b-- > bounds_[i];) free_[i].push_back(static_cast<int32_t>(b));
    }
}

int64_t BlockTable::free_blocks() const {
    int64_t total = 0;
    for (const auto& list : free_) total += static_cast<int64_t>(list.size());
    return total;
}

int BlockTable::roomiest_node() const {
    const auto less = [](const auto& a, const auto& b) { return a.size() < b.size(); };
    return static_cast<int>(std::max_element(free_.begin(), free_.end(), less) - free_.begin());
}

// Returns the home of a new sequence: the roomiest, or, to fill, the roomiest of those begun that has a third free.
int BlockTable::new_home() const {
    if (!fills_) return roomiest_node();
    int begun = -1, untouched = -1;
    for (int i = nodes() - 1; i >= 0; --i) {
        const int64_t size = bounds_[i + 1] - bounds_[i];
        if (free_blocks(i) == size)
            untouched = i;
        else if (3 * free_blocks(i) >= size && (begun < 0 || free_blocks(i) >= free_blocks(begun)))
            begun = i;
    }
    return begun >= 0 ? begun : untouched >= 0 ? untouched : roomiest_node();
}

int BlockTable::node_of(int32_t block) const {
    return static_cast<int>(std::upper_bound(bounds_.begin() + 1, bounds_.end() - 1, block) - bounds_.begin()) - 1;
}

const BlockTable::Slot& BlockTable::opened(int slot) const {
    if (slot < 0 || slot >= max_sequences()) {
        invalid("slot " + str(slot) + " is out of range: expected 0 to " + str(max_sequences() - 1));
    }
    if (!slots_[slot].open) invalid("slot " + str(slot) + " is not open; extend it first");
    return slots_[slot];
}

int32_t BlockTable::take_block(int home) {
    std::vector<int32_t>& list = free_[free_[home].empty() ? roomiest_node() : home];
    const int32_t block = list.back();
    list.pop_back();
    references_[block] = 1;
    taken_.push_back(block);
    return block;
}

void BlockTable::drop_block(int32_t block) {
    if (--references_[block] == 0) free_[node_of(block)].push_back(block);
}

// Drops the blocks of a group from a place on, the last one first.
void BlockTable::drop_from(std::vector<int32_t>& held, size_t place) {
    for (; held.size() > place; held.pop_back())
        if (held.back() >= 0) drop_block(held.back());
}

// Returns whether a slot that grows to `length` writes to its last block of a group, which others hold, too.
bool BlockTable::copies_tail(const Slot& s, int group, int64_t length) const {
    if (length == s.length || s.length % block_tokens_ == 0) return false;
    return s.length / block_tokens_ >= first_held(group, reached(s, length)) && references_[s.blocks[group].back()] > 1;
}

// Returns how many blocks of a group a slot lacks to grow to `length`.
int64_t BlockTable::missing(const Slot& s, int group, int64_t length) const {
    return blocks_for(length) - std::max<int64_t>(s.blocks[group].size(), first_held(group, reached(s, length)));
}

// Drops the blocks that are of no use to a sequence of `length`; notes them in `left`.
void BlockTable::leave_windows(Slot& s, int64_t length, std::vector<Left>& left) {
    for (int g = 0; g < groups(); ++g) {
        std::vector<int32_t>& held = s.blocks[g];
        const int64_t end = std::min<int64_t>(first_held(g, reached(s, length)), held.size());
        for (int64_t b = first_held(g, s.reached); b < end; ++b) {
            left.push_back({&held[b], held[b]});
            drop_block(held[b]);
            held[b] = -1;
        }
    }
}

// Takes back what `leave_windows` has dropped last.
void BlockTable::take_back(const std::vector<Left>& left) {
    for (auto l = left.rbegin(); l != left.rend(); ++l) {
        *l->place = l->block;
        if (references_[l->block]++ == 0) free_[node_of(l->block)].pop_back();
    }
}

std::vector<BlockTable::Copy> BlockTable::extend(const int32_t* slots, const int32_t* counts, int n) {
    check_slots(slots, n);
    for (int i = 0; i < n; ++i)
        if (counts[i] < 0) invalid("count " + str(counts[i]) + " of slot " + str(slots[i]) + " is negative");

    std::vector<Left> left;
    for (int i = 0; i < n; ++i) leave_windows(slots_[slots[i]], slots_[slots[i]].length + counts[i], left);
    // All but the last holder copy a shared, partly filled last block; so holders leave one by one.
    int64_t needed = 0;
    std::vector<std::pair<int, int>> copying;  // slots and groups
    for (int i = 0; i < n; ++i) {
        const Slot& s = slots_[slots[i]];
        const int64_t length = s.length + counts[i];
        for (int g = 0; g < groups(); ++g) {
            needed += missing(s, g, length);
            if (!copies_tail(s, g, length)) continue;
            --references_[s.blocks[g].back()];
            copying.emplace_back(slots[i], g);
        }
    }
    needed += static_cast<int64_t>(copying.size());
    if (needed > free_blocks()) {
        for (const auto& [slot, g] : copying) ++references_[slots_[slot].blocks[g].back()];
        take_back(left);
        throw CapacityError("KV cache full: " + str(tokens_of(needed)) + " tokens needed, " +
                            str(tokens_of(free_blocks())) + " free of " + str(capacity_tokens()) + " (blocks of " +
                            str(block_tokens_) +
                            "); lower the batch or the token limit, or give the KV cache more memory");
    }

    taken_.clear();
    std::vector<Copy> copies;
    for (const auto& [slot, g] : copying) {
        int32_t& tail = slots_[slot].blocks[g].back();
        copies.emplace_back(tail, take_block(slots_[slot].home));
        tail = copies.back().second;
    }
    for (int i = 0; i < n; ++i) {
        Slot& s = slots_[slots[i]];
        if (!s.open) s.home = new_home();
        s.open = true;
        s.length += counts[i];
        s.reached = reached(s, s.length);
        const auto want = static_cast<size_t>(blocks_for(s.length));
        for (int g = 0; g < groups(); ++g) {
            std::vector<int32_t>& held = s.blocks[g];
            if (held.size() == want) continue;
            held.resize(std::max<size_t>(held.size(), first_held(g, s.reached)), -1);
            while (held.size() < want) held.push_back(take_block(s.home));
        }
    }
    return copies;
}

void BlockTable::release(const int32_t* slots, int n) {
    check_slots(slots, n);
    for (int i = 0; i < n; ++i) opened(slots[i]);
    for (int i = 0; i < n; ++i) {
        Slot& s = slots_[slots[i]];
        for (std::vector<int32_t>& held : s.blocks) drop_from(held, 0);
        s.length = s.reached = 0;
        s.open = false;
    }
}

void BlockTable::fork(int src, int dst) {
    const int32_t both[] = {src, dst};
    check_slots(both, 2);
    opened(src);
    if (slots_[dst].open) invalid("slot " + str(dst) + " is open; release it before forking into it");
    slots_[dst] = slots_[src];
    for (const std::vector<int32_t>& held : slots_[dst].blocks)
        for (const int32_t block : held)
            if (block >= 0) ++references_[block];
}

void BlockTable::truncate(int slot, int64_t length) {
    const Slot& known = opened(slot);
    if (length < 0 || length > known.length) {
        invalid("slot " + str(slot) + ": cannot truncate length " + str(known.length) + " to " + str(length));
    }
    for (int g = 0; g < groups(); ++g) {
        if (first_seen(g, length) < first_held(g, known.reached))
            invalid("slot " + str(slot) + ": cannot truncate length " + str(known.length) + " to " + str(length) +
                    ", as tokens before its window are gone");
    }
    Slot& s = slots_[slot];
    s.length = length;
    for (std::vector<int32_t>& held : s.blocks) drop_from(held, static_cast<size_t>(blocks_for(length)));
}

std::vector<int32_t> BlockTable::held_blocks(int slot) const {
    const Slot& s = opened(slot);
    std::vector<int32_t> all;
    for (int g = 0; g < groups(); ++g) {
        const std::vector<int32_t>& held = s.blocks[g];
        const auto there = static_cast<size_t>(first_held(g, s.reached));
        for (auto b = static_cast<size_t>(first_held(g, s.length)); b < held.size(); ++b)
            all.push_back(held[std::max(b, there)]);
    }
    return all;
}

int64_t BlockTable::length(int slot) const { return opened(slot).length; }

int64_t BlockTable::first_block(int slot, int64_t count, bool all) const {
    return all ? 0 : std::max<int64_t>(length(slot) - count, 0) / block_tokens_;
}

void BlockTable::mark_ranges(const int32_t* slots, const int32_t* counts, int n, bool all, uint8_t* marks,
                             int64_t size) {
    check_written(slots, counts, n);
    check_marks(size, int64_t{n} * nodes());
    std::fill(marks, marks + size, uint8_t{0});
    for (int i = 0; i < n; ++i) {
        const std::vector<int32_t>& held = blocks(slots[i]);
        for (size_t b = first_block(slots[i], counts[i], all); b < held.size(); ++b)
            marks[int64_t{i} * nodes() + node_of(held[b])] = 1;
    }
}

std::vector<int32_t> BlockTable::written_blocks(const int32_t* slots, const int32_t* counts, int n) {
    check_written(slots, counts, n);
    std::vector<int32_t> written;
    for (int i = 0; i < n; ++i) {
        const std::vector<int32_t>& held = blocks(slots[i]);
        if (counts[i] > 0)
            written.insert(written.end(), held.begin() + first_block(slots[i], counts[i], false), held.end());
    }
    return written;
}

void BlockTable::mark_used(uint8_t* marks, int64_t size) const {
    check_marks(size, blocks_);
    for (int32_t b = 0; b < blocks_; ++b) marks[b] = references_[b] > 0;
}

}  // namespace hpcdecode
