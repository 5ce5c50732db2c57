#include "kv_items.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace hpcdecode {
namespace {
constexpr double kNewest = 0.25;  // weight of a region in the mean
}  // namespace

KvItems::KvItems(KvCache& cache, const LayerRows& rows)
    : cache_(cache), rows_(rows), lock_(cache.mutex_), append_queues_(cache.nodes_.count()) {
    check(rows_);
    const LayerLayout& l = cache_.pool_.layers()[rows_.layer];
    cache_.make_plan(rows_.layer, rows_.slots, rows_.counts, rows_.n);
    call_ = {&cache_,     rows_.layer,   &l,     &rows_.qkv, &rows_.out, l.shape.q_columns(),
             rows_.sinks, &cache_.plan_, nullptr};
    append_call_ = {&cache_, rows_.layer, &l, &rows_.kv, nullptr, 0, nullptr, nullptr, nullptr};
    if (cache_.plan_.write_first) cache_.write_all(call_);
    cache_.queues_.fill(cache_.plan_.node_items);
    bytes_ = cache_.plan_.bytes;
    cut_appends();
}

void KvItems::check(const LayerRows& r) {
    check_layer(r.layer, cache_.pool_.layers().size());
    const LayerShape& shape = cache_.pool_.layers()[r.layer].shape;
    if (shape.chooses() || cache_.pool_.framed())
        throw std::invalid_argument("beside: expected a layer that attends to all tokens, all of which are in memory");
    std::vector<int32_t> slots(r.slots, r.slots + r.n), counts(r.counts, r.counts + r.n);
    slots.insert(slots.end(), r.prompt_slots, r.prompt_slots + r.prompts);
    counts.insert(counts.end(), r.prompt_counts, r.prompt_counts + r.prompts);
    const int64_t all = cache_.pool_.check_written(slots.data(), counts.data(), r.n + r.prompts);
    const int64_t attending = std::accumulate(r.counts, r.counts + r.n, int64_t{0});
    check_append(shape, all - attending, r.kv);
    check_attend(shape, attending, r.qkv, r.out, r.sinks, r.sink_count);
    cache_.pool_.check_seen(cache_.pool_.layers()[r.layer].group, r.slots, r.counts, r.n);
}

void KvItems::cut_appends() {
    const BlockPool& pool = cache_.pool_;
    int64_t token = 0;
    for (int i = 0; i < rows_.prompts; ++i) {
        SequencePlan s{};
        s.slot = rows_.prompt_slots[i];
        s.node = pool.home(s.slot);
        s.count = rows_.prompt_counts[i];
        s.length = pool.length(s.slot);
        s.first_token = token;
        token += s.count;
        appended_.push_back(s);
    }
    std::stable_sort(appended_.begin(), appended_.end(),
                     [](const SequencePlan& a, const SequencePlan& b) { return a.node < b.node; });
    const LayerLayout& l = *call_.layout;
    std::vector<int64_t> bounds(pool.nodes() + 1, 0);
    for (int32_t i = 0; i < rows_.prompts; ++i) {
        const SequencePlan& s = appended_[i];
        const int64_t first = pool.first_written(rows_.layer, s.slot, s.count);
        bytes_ += static_cast<int64_t>(static_cast<double>((s.length - first) * l.shape.kv_heads) * l.token_head_bytes);
        for (int64_t begin = first; begin < s.length;) {
            const int64_t end = std::min(s.length, (begin / kAppendTokens + 1) * kAppendTokens);
            for (int32_t head = 0; head < l.shape.kv_heads; ++head) appends_.push_back({i, head, begin, end});
            begin = end;
        }
        bounds[s.node + 1] = static_cast<int64_t>(appends_.size());
    }
    for (size_t i = 1; i < bounds.size(); ++i) bounds[i] = std::max(bounds[i], bounds[i - 1]);
    append_queues_.fill(bounds);
}

double KvItems::seconds(int64_t i) const {
    return static_cast<double>(cache_.plan_.find(i).item_bytes) * cache_.seconds_per_byte_ + kRowItemSeconds;
}

double KvItems::next_seconds(int node) const {
    const int64_t i = cache_.queues_.peek(node);
    return i < 0 ? -1 : seconds(i);
}

void KvItems::run_append(int64_t i) const {
    const Append& a = appends_[i];
    cache_.table_.append[static_cast<int>(cache_.pool_.type())](
        cache_.new_rows(append_call_, appended_[a.sequence], a.head, a.begin, a.end));
}

int64_t KvItems::append_group(int64_t i) const {
    return int64_t{appends_[i].sequence} * call_.layout->shape.kv_heads + appends_[i].head;
}

void KvItems::finish(double seconds, double busy_seconds) {
    cache_.bytes_read_ += cache_.plan_.bytes;
    cache_.attend_seconds_ += seconds;
    if (cache_.plan_.bytes == 0 || busy_seconds <= 0) return;
    const double now = busy_seconds / static_cast<double>(cache_.plan_.bytes);
    cache_.seconds_per_byte_ += kNewest * (now - cache_.seconds_per_byte_);
}

}  // namespace hpcdecode
