#include "plan.h"

#include <algorithm>
#include <numeric>

namespace hpcdecode {
namespace {

constexpr int64_t kItemBytes = 128 << 10;  // worth handing to a thread
constexpr int64_t kMaxItemRows = 512;      // query rows of all heads of an item, whose state should stay in cache
constexpr int64_t kItemsPerThread = 16;    // so that the last item is a small share of the whole

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the first position that a sequence's new tokens see, or the first of those that are listed.
int64_t first_position(const LayerShape& shape, const SequencePlan& s) {
    return s.chosen != nullptr ? 0 : shape.window.first(s.length - s.count + 1);
}

int64_t head_bytes(const LayerLayout& layer, const SequencePlan& s) {
    const auto seen = static_cast<double>(s.length - first_position(layer.shape, s));
    return static_cast<int64_t>(seen * layer.token_head_bytes);
}

}  // namespace

void AttendPlan::cut(SequencePlan& s, const LayerLayout& layer, int64_t bytes_per_head, int threads) const {
    const int heads = layer.shape.kv_heads, together = s.chosen_of_head > 0 ? 1 : heads;
    s.row_blocks = static_cast<int>(ceil_div(s.count * layer.shape.group(), kMaxRowBlock));
    s.write_first = s.row_blocks > 1 && !s.written;
    s.segments = 1;
    s.segment_pieces = s.pieces;
    const int64_t rows = std::min<int64_t>(s.count * layer.shape.group(), kMaxRowBlock);
    s.heads_per_item = static_cast<int>(std::clamp<int64_t>(kMaxItemRows / rows, 1, together));
    if (threads > 1) {
        const int64_t want = std::max(kItemBytes, bytes / (threads * kItemsPerThread));
        const int64_t have = bytes_per_head * s.heads_per_item;
        if (s.row_blocks == 1 && have > want && s.pieces > 1) {
            s.segment_pieces = std::max<int64_t>(1, s.pieces * want / have);
            s.segments = static_cast<int>(ceil_div(s.pieces, s.segment_pieces));
        }
        if (have / s.segments > 2 * want) {
            const int64_t fit = want * s.segments / std::max<int64_t>(bytes_per_head, 1);
            s.heads_per_item = static_cast<int>(std::clamp<int64_t>(fit, 1, s.heads_per_item));
        }
    }
    s.head_items = static_cast<int>(ceil_div(heads, s.heads_per_item));
    s.item_bytes = bytes_per_head * s.heads_per_item / s.segments;
}

void AttendPlan::clear() {
    sequences.clear();
    items = pending = partial_floats = bytes = 0;
    write_first = false;
}

void AttendPlan::add(const LayerLayout& l, SequencePlan s) {
    s.piece_begin = first_position(l.shape, s) / kPiece;
    s.pieces = ceil_div(s.length, kPiece) - s.piece_begin;
    bytes += head_bytes(l, s) * l.shape.kv_heads;
    sequences.push_back(s);
}

void AttendPlan::make(const BlockPool& pool, int layer, const int32_t* slots, const int32_t* counts, int n,
                      int threads) {
    const LayerLayout& l = pool.layers()[layer];
    clear();
    int64_t token = 0;
    for (int i = 0; i < n; ++i) {
        SequencePlan s{};
        s.slot = slots[i];
        s.count = counts[i];
        s.first_token = token;
        token += s.count;
        if (s.count == 0) continue;
        s.length = pool.length(s.slot);
        s.node = pool.node(s.slot);
        add(l, s);
    }
    cut_all(l, pool.node_count(), threads);
}

void AttendPlan::make(const LayerLayout& layer, const std::vector<int64_t>& lengths, int threads) {
    clear();
    for (const int64_t length : lengths) {
        SequencePlan s{};
        s.count = 1;
        s.length = length;
        add(layer, s);
    }
    cut_all(layer, 1, threads);
}

void AttendPlan::make_chosen(const BlockPool& pool, int layer, const std::vector<Query>& queries,
                             const std::vector<Choice>& choices, int threads) {
    const LayerLayout& l = pool.layers()[layer];
    clear();
    for (const Query& q : queries) {
        SequencePlan s{};
        s.slot = q.slot;
        s.count = 1;
        s.written = true;
        s.first_token = q.token;
        s.length = l.attended(q.length);
        s.node = pool.node(s.slot);
        const bool chooses = l.chooses(q.length);
        if (chooses || l.entries > 0) s.chosen = choices[q.slot].of(q.place);
        if (chooses && l.shape.has_blocks()) s.chosen_of_head = choices[q.slot].stride;
        if (chooses) bytes += l.scored(q.length) * static_cast<int64_t>(l.index.row_bytes);
        add(l, s);
    }
    cut_all(l, pool.node_count(), threads);
}

void AttendPlan::cut_all(const LayerLayout& l, int nodes, int threads) {
    const LayerShape& shape = l.shape;
    const auto before = [](const SequencePlan& a, const SequencePlan& b) {
        return a.node != b.node ? a.node < b.node : a.item_bytes / kItemBytes > b.item_bytes / kItemBytes;
    };
    for (SequencePlan& s : sequences) cut(s, l, head_bytes(l, s), threads);
    if (threads > 1 && !std::is_sorted(sequences.begin(), sequences.end(), before))
        std::stable_sort(sequences.begin(), sequences.end(), before);
    node_sequences.assign(nodes + 1, 0);
    node_items.assign(nodes + 1, 0);
    for (SequencePlan& s : sequences) {
        s.first_item = items;
        s.first_pending = pending;
        s.first_partial = partial_floats;
        items += s.items();
        ++node_sequences[s.node + 1];
        node_items[s.node + 1] += s.items();
        write_first = write_first || s.write_first;
        if (s.segments == 1) continue;
        pending += s.head_items;
        partial_floats += s.partials() * shape.kv_heads * s.count * shape.group() * (2 + l.head.v_pad);
    }
    std::partial_sum(node_sequences.begin(), node_sequences.end(), node_sequences.begin());
    std::partial_sum(node_items.begin(), node_items.end(), node_items.begin());
}

const SequencePlan& AttendPlan::find(int64_t item) const {
    const auto after = std::upper_bound(sequences.begin(), sequences.end(), item,
                                        [](int64_t x, const SequencePlan& s) { return x < s.first_item; });
    return *(after - 1);
}

}  // namespace hpcdecode
