// Layers with compressed entries, or with pools of tokens: where these and their index keys lie in blocks, and which
// rows of blocks a token attends to.
#include <algorithm>

#include "call.h"

namespace hpcdecode {

// Writes the new tokens of a sequence, and the entries that they complete with their index keys.
void KvCache::write_entries(const Call& call, const SequencePlan& s) {
    const LayerLayout& l = *call.layout;
    const auto append = table_.append[static_cast<int>(pool_.type())];
    const int64_t tokens = l.block_tokens, rate = l.shape.compress_rate;
    for (int64_t begin = s.length - s.count, end; begin < s.length; begin = end) {
        end = std::min(s.length, (begin / tokens + 1) * tokens);
        AppendArgs own = new_rows(call, s, 0, begin, end);
        own.position = l.row_of_token(begin);
        append(own);
    }
    for (int64_t entry = (s.length - s.count) / rate; entry < s.length / rate; ++entry) {
        const int64_t last = (entry + 1) * rate - 1, row = s.first_token + last - (s.length - s.count);
        AppendArgs own = new_rows(call, s, 0, last, last + 1);
        own.k = own.v = at(*call.in, row, call.k_column + l.shape.entry_column());
        own.position = l.row_of_entry(entry);
        append(own);
    }
    if (l.shape.has_indexer()) write_index_keys(call, s, rate);
}

// Writes the index keys of the entries or pools of `each` tokens that the new tokens of a sequence complete.
void KvCache::write_index_keys(const Call& call, const SequencePlan& s, int64_t each) {
    const int64_t column = call.k_column + call.layout->shape.index_k_column();
    for (int64_t i = (s.length - s.count) / each; i < s.length / each; ++i) {
        const int64_t last = (i + 1) * each - 1, row = s.first_token + last - (s.length - s.count);
        AppendArgs own = new_rows(call, s, 0, last, last + 1);
        own.kv = pool_.index_view(call.layer, s.slot);
        own.k = own.v = at(*call.in, row, column);
        own.position = i;
        table_.append[static_cast<int>(index_type(pool_.type()))](own);
    }
}

// Lists the rows that a query attends to: those of entries, which are chosen if not all are seen, and of its window.
void KvCache::list_rows(const LayerLayout& l, const Query& q) {
    Choice& c = choices_[q.slot];
    int32_t* row = c.positions.data() + q.place * c.stride;
    const int64_t first = l.shape.window.first(q.length), entries = l.attended(q.length) - (q.length - first);
    const bool all = entries == l.choosable(q.length);
    for (int64_t i = 0; i < entries; ++i, ++row) *row = static_cast<int32_t>(l.row_of_entry(all ? i : *row));
    for (int64_t p = first; p < q.length; ++p) *row++ = static_cast<int32_t>(l.row_of_token(p));
}

}  // namespace hpcdecode
