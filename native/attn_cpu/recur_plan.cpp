#include "recur_plan.h"

#include <algorithm>
#include <numeric>

namespace hpcdecode {
namespace {

constexpr int64_t kItemFloats = 16 << 10;     // work worth handing to a thread
constexpr int64_t kItemsPerThread = 16;       // so that the last item is a small share of the whole
constexpr int64_t kFewItemsPerThread = 4;     // with fewer, heads that should stay together are parted
constexpr int64_t kCachedFloats = 64 << 10;   // state of an item of several tokens, which should stay in cache
constexpr int64_t kStreamedFloats = 1 << 20;  // of one token: straight lines of memory are read fastest

}  // namespace

int RecurPlan::heads_per_part(const RecurCost& c, int64_t count, int threads) const {
    int64_t heads = c.heads;
    int64_t unit = c.unit;
    if (threads > 1) {
        const int64_t want = std::max(kItemFloats, work / (threads * kItemsPerThread));
        heads = std::min(heads, want / std::max<int64_t>(c.of_head * count, 1));
        const int64_t units = static_cast<int64_t>(sequences.size()) * (c.heads / c.unit);
        if (heads < c.unit && units < threads * kFewItemsPerThread) unit = c.least;
    }
    heads = std::min(heads, (count > 1 ? kCachedFloats : kStreamedFloats) / std::max<int64_t>(c.state_floats, 1));
    return static_cast<int>(std::min<int64_t>(std::max<int64_t>(heads / unit, 1) * unit, c.heads));
}

void RecurPlan::make(const StateSlots& slots, int layer, const RecurCost& cost, const int32_t* numbers,
                     const int32_t* counts, int n, int threads) {
    sequences.clear();
    groups.clear();
    items = work = 0;
    heads_ = cost.heads;
    int64_t token = 0, tokens = 0;
    for (int i = 0; i < n; ++i) {
        const int slot = numbers[i];
        if (counts[i] > 0) {
            const int64_t held = slots.held(slot, layer, counts[i]);
            sequences.push_back({slot, slots.home(slot), counts[i], token, held});
            tokens += held;
        }
        token += counts[i];
    }
    work = cost.of_head * cost.heads * (token + tokens);
    const auto before = [](const SequenceRun& a, const SequenceRun& b) {
        return a.node != b.node ? a.node < b.node : a.tokens() > b.tokens();
    };
    if (!std::is_sorted(sequences.begin(), sequences.end(), before))
        std::stable_sort(sequences.begin(), sequences.end(), before);
    node_sequences.assign(slots.nodes() + 1, 0);
    node_items.assign(slots.nodes() + 1, 0);
    for (auto first = sequences.begin(); first != sequences.end();) {
        const auto end = std::find_if(first, sequences.end(), [&](const SequenceRun& s) { return before(*first, s); });
        const int heads = heads_per_part(cost, first->tokens(), threads);
        groups.push_back({first - sequences.begin(), end - first, heads, items});
        const int64_t added = (end - first) * ((cost.heads + heads - 1) / heads);
        node_sequences[first->node + 1] += end - first;
        node_items[first->node + 1] += added;
        items += added;
        first = end;
    }
    std::partial_sum(node_sequences.begin(), node_sequences.end(), node_sequences.begin());
    std::partial_sum(node_items.begin(), node_items.end(), node_items.begin());
}

RecurItem RecurPlan::find(int64_t item) const {
    const auto after = std::upper_bound(groups.begin(), groups.end(), item,
                                        [](int64_t x, const RunGroup& g) { return x < g.first_item; });
    const RunGroup& g = *(after - 1);
    const int64_t i = item - g.first_item;
    const int first = static_cast<int>(i / g.sequences) * g.heads_per_part;
    return {&sequences[g.first_sequence + i % g.sequences], first, std::min(g.heads_per_part, heads_ - first)};
}

}  // namespace hpcdecode
