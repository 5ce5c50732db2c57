#include "choice.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>

#include "call.h"

namespace hpcdecode {
namespace {

constexpr int64_t kSpan = 64 * kChunk;             // positions that an item scores
constexpr int64_t kMostScores = int64_t{1} << 22;  // of some queries at once, unless one alone has more
constexpr int64_t kInlineScores = 1 << 12;         // fewer than this are not worth waking threads
constexpr int kBucketBits = 11;

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }
int64_t in_chunks(int64_t length) { return (length + kChunk - 1) / kChunk * kChunk; }

// Turns the pools that a token which sees `length` positions chose to these positions, or to those of their runs, and
// adds the ones behind the pools that it chose from.
void list_pools(const LayerLayout& l, int64_t length, int32_t* chosen) {
    const int64_t pool = l.shape.index_pool, step = l.listed_tokens(), each = pool / step, count = l.most_chosen();
    for (int64_t i = count - 1; i >= 0; --i) {  // no pool is overwritten before it is read
        const int64_t first = chosen[i] * pool;
        for (int64_t j = 0; j < each; ++j) chosen[i * each + j] = static_cast<int32_t>(first + j * step);
    }
    chosen += count * each;
    for (int64_t p = l.choosable(length) * pool; p < length; p += step) *chosen++ = static_cast<int32_t>(p);
}

// Returns the largest of the scores of a block's tokens.
float most_of(const float* scores, int64_t tokens) {
    constexpr int kLanes = 8;  // that a compiler takes together
    float most[kLanes];
    std::fill_n(most, kLanes, scores[0]);
    int64_t i = 0;
    for (; i + kLanes <= tokens; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane)
            most[lane] = most[lane] < scores[i + lane] ? scores[i + lane] : most[lane];
    for (; i < tokens; ++i) most[0] = std::max(most[0], scores[i]);
    return *std::max_element(most, most + kLanes);
}

// Returns how many index keys are scored at once: whole chunks, and whole blocks.
int64_t span_of(const LayerShape& shape) {
    const int64_t least = shape.has_blocks() ? std::lcm(shape.index_pool, int64_t{kChunk}) : kChunk;
    return std::max(kSpan / least, int64_t{1}) * least;
}

// Returns a number that is larger for a larger x.
uint32_t ordered(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace

std::vector<Query> queries_of(const BlockTable& table, const int32_t* slots, const int32_t* counts, int n) {
    std::vector<Query> queries;
    for (int i = 0; i < n; ++i) {
        const int64_t before = counts[i] > 0 ? table.length(slots[i]) - counts[i] : 0;
        for (int64_t place = 0; place < counts[i]; ++place)
            queries.push_back({slots[i], static_cast<int64_t>(queries.size()), place, before + place + 1});
    }
    return queries;
}

void choose(const float* scores, int64_t length, int64_t count, int32_t* chosen, std::vector<uint32_t>& room) {
    constexpr int kShift = 32 - kBucketBits;
    uint32_t sizes[1 << kBucketBits] = {};
    for (int64_t i = 0; i < length; ++i) ++sizes[ordered(scores[i]) >> kShift];
    int64_t above = 0;
    uint32_t bucket = (1 << kBucketBits) - 1;
    while (above + sizes[bucket] < count) above += sizes[bucket--];
    room.clear();
    for (int64_t i = 0; i < length; ++i)
        if (const uint32_t key = ordered(scores[i]); key >> kShift == bucket) room.push_back(key);
    const auto last = room.begin() + (count - above - 1);
    std::nth_element(room.begin(), last, room.end(), std::greater<uint32_t>());
    const uint32_t least = *last;
    int64_t equal = count - above - (std::count_if(room.begin(), last, [&](uint32_t key) { return key > least; }));
    for (int64_t i = 0; i < length; ++i) {
        const uint32_t key = ordered(scores[i]);
        if (key > least || (key == least && equal-- > 0)) *chosen++ = static_cast<int32_t>(i);
    }
}

size_t index_scratch_bytes(const LayerLayout& layer) {
    if (!layer.shape.has_indexer()) return 0;
    const size_t heads = layer.shape.index_heads, f = sizeof(float);
    return padded(heads * layer.index.k_pad * f) + padded(kMaxPassRows * kChunk * f) + padded(heads * f) +
           padded(layer.index.run_bytes);
}

// Writes the scores of index keys [begin, end) for one query, or those of their blocks, of one list after the other
// where there are several. scores: Of all that the query chooses from.
void KvCache::score(const Call& call, const Query& query, int64_t begin, int64_t end, float* scores, int thread) {
    const LayerShape& shape = call.layout->shape;
    IndexArgs a{};
    a.keys = pool_.index_view(call.layer, query.slot);
    a.q = at(*call.in, query.token, shape.index_q_column());
    a.type = call.in->type;
    a.heads = shape.index_heads;
    a.begin = begin;
    a.end = end;
    a.scratch = scratch_[thread].get();
    const auto kernel = table_.score[static_cast<int>(index_type(pool_.type()))];
    if (!shape.has_blocks()) {
        a.weights = at(*call.in, query.token, shape.index_weight_column());
        a.scores = scores + begin;
        return kernel(a);
    }
    std::vector<float>& own = of_tokens_[thread];
    a.scores_of_head = in_chunks(end - begin);
    own.resize(a.scores_of_head * a.heads);
    a.scores = own.data();
    kernel(a);
    const int64_t tokens = shape.index_pool, of_list = in_chunks(call.layout->choosable(query.length));
    for (int list = 0; list < a.heads; ++list)
        for (int64_t i = 0; i < (end - begin) / tokens; ++i)
            scores[list * of_list + begin / tokens + i] = most_of(&own[list * a.scores_of_head + i * tokens], tokens);
}

// Makes room for what the layer's indexer chooses for new tokens, or for the entries that they see; without either,
// checks that the layer before has chosen.
void KvCache::begin_choices(const LayerLayout& layer, const int32_t* slots, const int32_t* counts, int n) {
    const LayerShape& shape = layer.shape;
    for (int i = 0; i < n; ++i) {
        if (counts[i] == 0) continue;
        Choice& c = choices_[slots[i]];
        if (shape.has_indexer() || shape.has_entries()) {
            c.length = pool_.length(slots[i]);
            c.count = counts[i];
            const int64_t most = shape.index_topk + std::max<int64_t>(shape.index_local, 1) * shape.index_pool;
            c.lists = shape.choices();
            c.stride = layer.chooses(c.length) ? in_chunks(most) / layer.listed_tokens() : 0;
            if (shape.has_entries()) c.stride = layer.attended(c.length);
            c.positions.resize(c.count * c.lists * c.stride);
        } else if (c.length != pool_.length(slots[i]) || c.count != counts[i]) {
            throw std::invalid_argument("slot " + std::to_string(slots[i]) +
                                        ": expected the layers whose choice this one takes to attend before it");
        }
    }
}

// Chooses by the scores of all that a query chooses from, for one of its lists.
void KvCache::choose_for(const Call& call, const Query& q, int list, const float* scores, int thread) {
    const LayerLayout& l = *call.layout;
    int32_t* chosen = choices_[q.slot].list(q.place, list);
    choose(scores, l.choosable(q.length), l.most_chosen(), chosen, rooms_[thread]);
    if (l.shape.has_pools() || l.shape.has_blocks()) list_pools(l, q.length, chosen);
}

// Chooses for every query on the calling thread. scores: Is overwritten.
void KvCache::choose_here(const Call& call, const std::vector<Query>& queries, int thread, std::vector<float>& scores) {
    const LayerLayout& l = *call.layout;
    for (const Query& q : queries) {
        if (l.shape.has_indexer() && l.chooses(q.length)) {
            const int64_t of_list = in_chunks(l.choosable(q.length)), seen = l.scored(q.length);
            const int64_t span = span_of(l.shape);
            scores.resize(l.shape.choices() * of_list);
            for (int64_t begin = 0; begin < seen; begin += span)
                score(call, q, begin, std::min(begin + span, seen), scores.data(), thread);
            for (int i = 0; i < l.shape.choices(); ++i) choose_for(call, q, i, scores.data() + i * of_list, thread);
        }
        if (l.entries > 0) list_rows(l, q);
    }
}

// Chooses for every query, some of them at a time on all threads: first the scores, then the choices.
void KvCache::choose_together(const Call& call, const std::vector<Query>& queries) {
    struct Item {
        const Query* query;
        int64_t first_score, begin, end;
        int list = 0;
    };
    struct Job {
        KvCache& cache;
        const Call& call;
        std::vector<Item> spans, wholes;
        std::vector<float>& scores;
        std::atomic<size_t> next{0};
    } job{*this, call, {}, {}, scores_};
    const auto run = [&](int64_t scores, Workers::Work work) {
        job.next.store(0);
        scores > kInlineScores ? workers_->run(work, &job) : work(&job, 0);
    };
    const LayerLayout& l = *call.layout;
    const int64_t lists = l.shape.choices(), span = span_of(l.shape);
    for (size_t i = 0; i < queries.size();) {
        int64_t count = 0, products = 0;
        job.spans.clear();
        job.wholes.clear();
        for (; i < queries.size() && (count == 0 || count + lists * l.choosable(queries[i].length) <= kMostScores);
             ++i) {
            const Query& q = queries[i];
            const int64_t seen = l.scored(q.length);
            if (!l.chooses(q.length)) continue;
            products += lists * seen;
            for (int64_t begin = 0; begin < seen; begin += span)
                job.spans.push_back({&q, count, begin, std::min(begin + span, seen)});
            for (int list = 0; list < lists; ++list, count += in_chunks(l.choosable(q.length)))
                job.wholes.push_back({&q, count, 0, seen, list});
        }
        if (count == 0) continue;
        if (static_cast<int64_t>(scores_.size()) < count) scores_.resize(count);
        run(products, [](void* context, int thread) {
            Job& j = *static_cast<Job*>(context);
            for (size_t k; (k = j.next.fetch_add(1)) < j.spans.size();) {
                const Item& s = j.spans[k];
                j.cache.score(j.call, *s.query, s.begin, s.end, j.scores.data() + s.first_score, thread);
            }
        });
        run(count, [](void* context, int thread) {
            Job& j = *static_cast<Job*>(context);
            for (size_t k; (k = j.next.fetch_add(1)) < j.wholes.size();) {
                const Item& s = j.wholes[k];
                j.cache.choose_for(j.call, *s.query, s.list, j.scores.data() + s.first_score, thread);
            }
        });
    }
}

// Writes all new tokens, lets the layer's indexer choose, if it has one, and plans the attention to what is chosen.
void KvCache::choose_all(const Call& call, const int32_t* slots, const int32_t* counts, int n) {
    const LayerLayout& l = *call.layout;
    begin_choices(l, slots, counts, n);
    Call writing = call;
    writing.out = nullptr;  // all sequences
    write_all(writing);
    const std::vector<Query> queries = queries_of(pool_, slots, counts, n);
    if (l.shape.has_indexer()) choose_together(call, queries);
    for (size_t i = 0; l.entries > 0 && i < queries.size(); ++i) list_rows(l, queries[i]);
    plan_.make_chosen(pool_, call.layer, queries, choices_, workers_->threads());
    reserve_items(l);
}

}  // namespace hpcdecode
