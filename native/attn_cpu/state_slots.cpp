#include "state_slots.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>

namespace hpcdecode {
namespace {

std::string str(int64_t x) { return std::to_string(x); }

[[noreturn]] void invalid(const std::string& what) { throw std::invalid_argument(what); }

}  // namespace

StateSlots::StateSlots(int max_sequences, size_t layers, std::vector<int64_t> bounds, int lookahead)
    : layers_(layers), lookahead_(lookahead), bounds_(std::move(bounds)), free_(bounds_.size() - 1) {
    if (max_sequences < 1) invalid("max_sequences: expected at least 1, got " + str(max_sequences));
    if (lookahead < 0) invalid("lookahead: expected at least 0, got " + str(lookahead));
    slots_.resize(max_sequences);
    seen_.assign(max_sequences, false);
    for (int i = 0; i < nodes(); ++i)
        for (int64_t p = bounds_[i]; p < bounds_[i + 1]; ++p) free_[i].push_back(p);  // ascending: a heap
}

const StateSlots::Slot& StateSlots::opened(int slot) const {
    if (slot < 0 || slot >= max_sequences())
        invalid("slot " + str(slot) + " is out of range: expected 0 to " + str(max_sequences() - 1));
    if (!slots_[slot].open) invalid("slot " + str(slot) + " is not open; extend it first");
    return slots_[slot];
}

void StateSlots::check_slots(const int32_t* slots, int n) {
    std::fill(seen_.begin(), seen_.end(), false);
    for (int i = 0; i < n; ++i) {
        if (slots[i] < 0 || slots[i] >= max_sequences())
            invalid("slot " + str(slots[i]) + " is out of range: expected 0 to " + str(max_sequences() - 1));
        if (seen_[slots[i]]) invalid("slot " + str(slots[i]) + " is given twice in one call");
        seen_[slots[i]] = true;
    }
}

int StateSlots::node_of(int64_t place) const {
    return static_cast<int>(std::upper_bound(bounds_.begin() + 1, bounds_.end() - 1, place) - bounds_.begin()) - 1;
}

int StateSlots::roomiest_node() const {
    const auto less = [](const auto& a, const auto& b) { return a.size() < b.size(); };
    return static_cast<int>(std::max_element(free_.begin(), free_.end(), less) - free_.begin());
}

int64_t StateSlots::take_place(int node) {
    std::vector<int64_t>& list = free_[node];
    std::pop_heap(list.begin(), list.end(), std::greater<>());
    const int64_t place = list.back();
    list.pop_back();
    return place;
}

std::vector<int> StateSlots::extend(const int32_t* slots, const int32_t* counts, int n) {
    check_slots(slots, n);
    for (int i = 0; i < n; ++i)
        if (counts[i] < 0) invalid("count " + str(counts[i]) + " of slot " + str(slots[i]) + " is negative");
    std::vector<int> fresh;
    for (int i = 0; i < n; ++i) {
        Slot& s = slots_[slots[i]];
        if (!s.open) {
            const std::vector<int64_t> none(layers_, 0);
            s = {true, take_place(roomiest_node()), 0, none, none};
            fresh.push_back(slots[i]);
        }
        s.length += counts[i];
    }
    return fresh;
}

std::vector<int64_t> StateSlots::release(const int32_t* slots, int n) {
    check_slots(slots, n);
    for (int i = 0; i < n; ++i) opened(slots[i]);
    std::vector<int64_t> places;
    for (int i = 0; i < n; ++i) {
        Slot& s = slots_[slots[i]];
        std::vector<int64_t>& list = free_[node_of(s.place)];
        list.push_back(s.place);
        std::push_heap(list.begin(), list.end(), std::greater<>());
        places.push_back(s.place);
        s = {};
    }
    return places;
}

void StateSlots::fork(int src, int dst) {
    const int32_t both[] = {src, dst};
    check_slots(both, 2);
    opened(src);
    if (slots_[dst].open) invalid("slot " + str(dst) + " is open; release it before forking into it");
    slots_[dst] = slots_[src];
    slots_[dst].place = take_place(free_[home(src)].empty() ? roomiest_node() : home(src));
}

void StateSlots::truncate(int slot, int64_t length) {
    const Slot& now = opened(slot);
    const int64_t least = *std::max_element(now.in_state.begin(), now.in_state.end());
    if (length > now.length || length < least)
        invalid("slot " + str(slot) + ": cannot truncate length " + str(now.length) + " to " + str(length) + ": " +
                str(least) + " tokens are in its states");
    Slot& s = slots_[slot];
    s.length = length;
    for (int64_t& done : s.done) done = std::min(done, length);
}

// The first token of a call is known to be right, and so are all of more than a longest guess has: those of a prompt.
int StateSlots::droppable(int64_t count) const {
    return count <= lookahead_ + 1 ? static_cast<int>(std::max<int64_t>(count - 1, 0)) : 0;
}

int64_t StateSlots::check_run(int layer, const int32_t* slots, const int32_t* counts, int n) {
    check_slots(slots, n);
    int64_t tokens = 0;
    for (int i = 0; i < n; ++i) {
        const Slot& s = opened(slots[i]);
        if (counts[i] < 0 || counts[i] != s.length - s.done[layer])
            invalid("slot " + str(slots[i]) + ": layer " + str(layer) + " has seen " + str(s.done[layer]) + " of " +
                    str(s.length) + " tokens, so count " + str(counts[i]) + " does not fit");
        tokens += counts[i];
    }
    return tokens;
}

void StateSlots::count_run(int layer, const int32_t* slots, const int32_t* counts, int n) {
    for (int i = 0; i < n; ++i) {
        if (counts[i] == 0) continue;
        Slot& s = slots_[slots[i]];
        s.done[layer] += counts[i];
        s.in_state[layer] = s.done[layer] - droppable(counts[i]);
    }
}

int StateSlots::open_slots() const {
    return static_cast<int>(std::count_if(slots_.begin(), slots_.end(), [](const Slot& s) { return s.open; }));
}

void StateSlots::check() const {
    std::vector<int> holders(bounds_.back(), 0);
    for (int i = 0; i < nodes(); ++i) {
        for (int64_t p : free_[i]) {
            if (node_of(p) != i) throw std::logic_error("place " + str(p) + " is listed free on node " + str(i));
            ++holders[p];
        }
    }
    for (size_t i = 0; i < slots_.size(); ++i) {
        const Slot& s = slots_[i];
        if (!s.open) continue;
        ++holders[s.place];
        for (int64_t done : s.done)
            if (done > s.length)
                throw std::logic_error("slot " + str(i) + ": a layer has seen " + str(done) + " of " + str(s.length) +
                                       " tokens");
        for (size_t layer = 0; layer < layers_; ++layer)
            if (s.in_state[layer] > s.done[layer] || s.in_state[layer] + lookahead_ < s.done[layer])
                throw std::logic_error("slot " + str(i) + ": " + str(s.in_state[layer]) + " of " + str(s.done[layer]) +
                                       " tokens are in a state");
    }
    for (size_t p = 0; p < holders.size(); ++p)
        if (holders[p] != 1) throw std::logic_error("place " + str(p) + ": holders " + str(holders[p]) + " != 1");
}

}  // namespace hpcdecode
