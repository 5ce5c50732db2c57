#include "recur_plan.h"

#include <algorithm>
#include <numeric>

namespace hpcdecode {
namespace {

constexpr int64_t kItemFloats = 16 << 10;    // work worth handing to a thread
constexpr int64_t kItemsPerThread = 16;      // so that the last item is a small share of the whole
constexpr int64_t kCachedFloats = 64 << 10;  // state of an item of several tokens, which should stay in cache

}  // namespace

int RecurPlan::heads_per_item(const RecurCost& c, int64_t count, int threads) const {
    int64_t heads = c.heads;
    if (threads > 1) {
        const int64_t want = std::max(kItemFloats, work / (threads * kItemsPerThread));
        heads = std::min(heads, want / std::max<int64_t>(c.of_head * count, 1));
    }
    if (count > 1) heads = std::min(heads, kCachedFloats / std::max<int64_t>(c.state_floats, 1));
    return static_cast<int>(std::max<int64_t>(heads / c.unit, 1) * c.unit);
}

void RecurPlan::make(const StateSlots& slots, const RecurCost& cost, const int32_t* numbers, const int32_t* counts,
                     int n, int threads) {
    sequences.clear();
    items = work = 0;
    most_heads = 0;
    int64_t token = 0;
    for (int i = 0; i < n; ++i) {
        if (counts[i] > 0) sequences.push_back({numbers[i], slots.home(numbers[i]), counts[i], token, 0, 0, 0});
        token += counts[i];
        work += cost.of_head * cost.heads * counts[i];
    }
    const auto before = [](const SequenceRun& a, const SequenceRun& b) {
        return a.node != b.node ? a.node < b.node : a.count > b.count;
    };
    if (threads > 1) std::stable_sort(sequences.begin(), sequences.end(), before);
    node_sequences.assign(slots.nodes() + 1, 0);
    node_items.assign(slots.nodes() + 1, 0);
    for (SequenceRun& s : sequences) {
        s.heads_per_item = std::min(heads_per_item(cost, s.count, threads), cost.heads);
        s.first_item = items;
        s.items = (cost.heads + s.heads_per_item - 1) / s.heads_per_item;
        items += s.items;
        most_heads = std::max(most_heads, s.heads_per_item);
        ++node_sequences[s.node + 1];
        node_items[s.node + 1] += s.items;
    }
    std::partial_sum(node_sequences.begin(), node_sequences.end(), node_sequences.begin());
    std::partial_sum(node_items.begin(), node_items.end(), node_items.begin());
}

const SequenceRun& RecurPlan::find(int64_t item) const {
    const auto after = std::upper_bound(sequences.begin(), sequences.end(), item,
                                        [](int64_t x, const SequenceRun& s) { return x < s.first_item; });
    return *(after - 1);
}

}  // namespace hpcdecode
