#include "prefill_items.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "row_args.h"

namespace hpcdecode {
namespace {
constexpr int64_t kPackTokens = 2 * kPromptTile;  // of an item, which begins and ends with a tile
constexpr int kLeastItemRows = 32;                // query rows; keys are read again for every item
constexpr double kLeastProducts = 1 << 19;        // of an item; fewer are not worth a cut
constexpr int kItemsPerThread = 4;                // so that the last item is a small share of the whole
}  // namespace

PromptItems::PromptItems(const PromptLayer& layer, const PromptKernel& kernel, const PromptRows& rows, int threads,
                         double seconds)
    : layer_(layer), kernel_(kernel), rows_(rows), seconds_(seconds) {
    const int32_t chunks = static_cast<int32_t>(rows.chunks.size());
    int64_t row = 0;
    double all = 0;
    for (int32_t i = 0; i < chunks; ++i) {
        const PromptChunk& c = rows.chunks[i];
        first_rows_.push_back(row);
        row += c.count;
        all += products_of(c.count - c.skipped, c.start + c.count) * layer.shape.kv_heads;
        cut_packs(i);
    }
    packs_ = static_cast<int64_t>(items_.size());
    packed_.expect(static_cast<uint32_t>(packs_));
    for (int32_t i = 0; i < chunks; ++i) cut_attention(i, std::max(all / (threads * kItemsPerThread), kLeastProducts));
    for (const Item& item : items_) products_ += item.products;
    // By powers of two, so that longer ones come first and neighbours mostly stay together.
    std::stable_sort(items_.begin() + packs_, items_.end(),
                     [](const Item& a, const Item& b) { return std::ilogb(a.products) > std::ilogb(b.products); });
}

// Returns the products of the last `tokens` of `keys` tokens, for one KV head.
double PromptItems::products_of(int64_t tokens, int64_t keys) const {
    const LayerShape& s = layer_.shape;
    if (s.window) keys = std::min(keys, s.window.size + tokens);
    return static_cast<double>(tokens * s.group()) * static_cast<double>(keys) * (s.k_dim + s.v_dim);
}

// Returns as many as scratch has room for, or fewer if that leaves threads without work.
int64_t PromptItems::tokens_per_item(const PromptChunk& c, double want) const {
    const int64_t most = layer_.tokens_per_item, least = std::max(1, kLeastItemRows / layer_.shape.group());
    const double fit = want / std::max(products_of(1, c.start + c.count), 1.0);
    return std::min(most, std::max(least, static_cast<int64_t>(std::min(fit, static_cast<double>(most)))));
}

void PromptItems::cut_packs(int32_t chunk) {
    const PromptChunk& c = rows_.chunks[chunk];
    for (int32_t head = 0; head < layer_.shape.kv_heads; ++head)
        for (int64_t at = 0; at < c.count;) {
            const int64_t end = std::min(c.count, (c.start + at) / kPackTokens * kPackTokens + kPackTokens - c.start);
            items_.push_back({chunk, head, at, end - at, 0});
            at = end;
        }
}

// Goes head by head, so that keys stay in the cache, and backwards, so that the last item is short.
void PromptItems::cut_attention(int32_t chunk, double want) {
    const PromptChunk& c = rows_.chunks[chunk];
    const int64_t step = tokens_per_item(c, want), runs = (c.count - c.skipped + step - 1) / step;
    for (int32_t head = 0; head < layer_.shape.kv_heads; ++head)
        for (int64_t run = runs - 1; run >= 0; --run) {
            const int64_t token = c.skipped + run * step, count = std::min(step, c.count - token);
            items_.push_back({chunk, head, token, count, products_of(count, c.start + token + count)});
        }
}

double PromptItems::next_seconds() const {
    const int64_t i = next_.load(std::memory_order_relaxed);
    if (i >= static_cast<int64_t>(items_.size())) return -1;
    if (packs(i)) return std::numeric_limits<double>::infinity();
    return ready(i) ? seconds(items_[i]) : 0;
}

int64_t PromptItems::take() {
    const int64_t i = next_.fetch_add(1);
    return i < static_cast<int64_t>(items_.size()) ? i : -1;
}

void PromptItems::run(int64_t i, uint8_t* scratch) {
    if (!packs(i)) return attend(items_[i], scratch);
    pack(items_[i]);
    note_packed();
}

void PromptItems::pack(const Item& item) const {
    const LayerShape& s = layer_.shape;
    const PromptChunk& c = rows_.chunks[item.chunk];
    const int64_t row = first_rows_[item.chunk] + item.token;
    PromptPackArgs a{};
    a.layout = &layer_.layout;
    a.tiles = reinterpret_cast<uint32_t*>(c.packed) + item.head * a.layout->tile_words;
    a.k = at(rows_.k, row, int64_t{item.head} * s.k_dim);
    a.v = at(rows_.v, row, int64_t{item.head} * s.v_dim);
    a.type = rows_.k.type;
    a.k_stride = rows_.k.stride;
    a.v_stride = rows_.v.stride;
    a.position = c.start + item.token;
    a.count = item.count;
    kernel_.pack(a);
}

void PromptItems::attend(const Item& item, uint8_t* scratch) const {
    const LayerShape& s = layer_.shape;
    const PromptChunk& c = rows_.chunks[item.chunk];
    const int64_t row = first_rows_[item.chunk] + item.token, q_head = int64_t{item.head} * s.group();
    PromptAttendArgs a{};
    a.layout = &layer_.layout;
    a.tiles = reinterpret_cast<const uint32_t*>(c.packed) + item.head * a.layout->tile_words;
    a.q = at(rows_.q, row, q_head * s.k_dim);
    a.type = rows_.q.type;
    a.q_stride = rows_.q.stride;
    a.group = s.group();
    a.position = c.start + item.token;
    a.count = item.count;
    a.window = s.window;
    a.scale = s.scale;
    a.softcap = s.softcap;
    a.bias = bias_args(s, rows_.q, row, q_head);
    a.sinks = sink_args(s, rows_.sinks, rows_.q, row, q_head);
    a.out = const_cast<uint8_t*>(at(rows_.out, row, q_head * s.v_dim));
    a.out_stride = rows_.out.stride;
    a.scratch = scratch;
    kernel_.attend(a);
}

}  // namespace hpcdecode
