// What block_table.h checks: the arguments of calls, and the table itself.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "block_table.h"

namespace hpcdecode {
namespace {

std::string str(int64_t x) { return std::to_string(x); }

[[noreturn]] void invalid(const std::string& what) { throw std::invalid_argument(what); }

}  // namespace

void BlockTable::check_slots(const int32_t* slots, int n) {
    if (++stamp_ == 0) {
        std::fill(stamps_.begin(), stamps_.end(), 0);
        stamp_ = 1;
    }
    for (int i = 0; i < n; ++i) {
        if (slots[i] < 0 || slots[i] >= max_sequences()) {
            invalid("slot " + str(slots[i]) + " is out of range: expected 0 to " + str(max_sequences() - 1));
        }
        if (stamps_[slots[i]] == stamp_) invalid("slot " + str(slots[i]) + " is given twice in one call");
        stamps_[slots[i]] = stamp_;
    }
}

int64_t BlockTable::check_written(const int32_t* slots, const int32_t* counts, int n) {
    check_slots(slots, n);
    int64_t tokens = 0;
    for (int i = 0; i < n; ++i) {
        check_tail(slots[i], counts[i]);
        tokens += counts[i];
    }
    return tokens;
}

void BlockTable::check_seen(int group, const int32_t* slots, const int32_t* counts, int n) const {
    for (int i = 0; windows_[group] && i < n; ++i) {
        if (counts[i] < 2) continue;
        const int64_t end = length(slots[i]), first = windows_[group].first(end - counts[i] + 1);
        if (first / block_tokens_ >= first_place(slots[i], group)) continue;
        invalid("slot " + str(slots[i]) + ": its last " + str(counts[i]) +
                " positions see some that have left the window; expected 1 at a time");
    }
}

void BlockTable::check_tail(int slot, int64_t count) const {
    const Slot& s = opened(slot);
    if (count < 0 || count > s.length) {
        invalid("slot " + str(slot) + ": count " + str(count) + " does not fit its length " + str(s.length));
    }
    if (count == 0) return;
    for (const std::vector<int32_t>& held : s.blocks) {
        for (int64_t b = (s.length - count) / block_tokens_; b < static_cast<int64_t>(held.size()); ++b) {
            if (held[b] >= 0 && references_[held[b]] != 1) {
                invalid("slot " + str(slot) + ": its last " + str(count) +
                        " positions are shared with a fork; extend first");
            }
        }
    }
}

void BlockTable::check() const {
    std::vector<int32_t> held(blocks_, 0), listed(blocks_, 0);
    for (size_t i = 0; i < slots_.size(); ++i) {
        const Slot& s = slots_[i];
        for (int g = 0; g < groups(); ++g) {
            const int64_t have = static_cast<int64_t>(s.blocks[g].size()), first = first_held(g, s.reached);
            if (have != blocks_for(s.length) || (!s.open && have != 0)) {
                throw std::logic_error("slot " + str(i) + ": blocks " + str(have) + " != ceil(length " + str(s.length) +
                                       " / block_tokens " + str(block_tokens_) + ")");
            }
            for (int64_t b = 0; b < have; ++b) {
                if ((s.blocks[g][b] >= 0) != (b >= first))
                    throw std::logic_error("slot " + str(i) + ": block " + str(s.blocks[g][b]) + " in place " + str(b) +
                                           " of group " + str(g) + ", which holds those from place " + str(first) +
                                           " on");
                if (b >= first) ++held[s.blocks[g][b]];
            }
        }
    }
    for (int i = 0; i < nodes(); ++i) {
        for (int32_t b : free_[i]) {
            ++listed[b];
            if (node_of(b) == i) continue;
            throw std::logic_error("block " + str(b) + " of node " + str(node_of(b)) + " is listed free on node " +
                                   str(i));
        }
    }
    for (int32_t b = 0; b < blocks_; ++b) {
        if (held[b] != references_[b]) {
            throw std::logic_error("block " + str(b) + ": holders " + str(held[b]) + " != references " +
                                   str(references_[b]));
        }
        if ((references_[b] == 0 ? 1 : 0) != listed[b]) {
            throw std::logic_error("block " + str(b) + ": references " + str(references_[b]) + ", but listed free " +
                                   str(listed[b]) + " times");
        }
    }
}

}  // namespace hpcdecode
