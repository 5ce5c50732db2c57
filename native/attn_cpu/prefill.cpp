#include "prefill.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <stdexcept>

#include "isa.h"

namespace hpcdecode {
namespace {

constexpr double kInlineProducts = 1 << 20;  // fewer than this are not worth waking threads

[[noreturn]] void invalid(const std::string& what) { throw std::invalid_argument(what); }

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

PromptLayout lay_out_prompts(const LayerShape& s, const PromptKernel& kernel) {
    PromptLayout l{};
    l.k_dim = s.k_dim;
    l.v_dim = s.v_dim;
    const int elements = kernel.word_elements;
    l.k_words = static_cast<int>(round_up((s.k_dim + elements - 1) / elements, kernel.word_block));
    l.v_pad = static_cast<int>(round_up(s.v_dim, kTile));
    l.v_offset = int64_t{l.k_words} * kPromptTile;
    l.tile_words = l.v_offset + int64_t{kPromptTile / elements} * l.v_pad;
    l.tile_stride = l.tile_words * s.kv_heads;
    return l;
}

// Returns the bytes that Prefill::carve of the kernels takes.
size_t scratch_bytes(const PromptLayout& l, const PromptKernel& kernel, int64_t rows) {
    const int64_t padded = round_up(rows, kernel.rows);
    const int64_t words[] = {
        padded * l.k_words,       padded * l.v_pad, padded, padded * kTile, 2 * kernel.rows * kPromptTile,
        kernel.rows * kPromptTile};
    int64_t bytes = 0;
    for (int64_t n : words) bytes += round_up(n * 4, 64);
    return static_cast<size_t>(bytes);
}

}  // namespace

// The chunks of a call, and their first items. An item packs one KV head, or attends from some tokens for one KV head.
struct Prefill::Call {
    struct Part {
        PromptChunk chunk;
        int64_t first_row, first_item, items_per_head;
    };
    const Prefill* prefill;
    const Layer* layer;
    std::vector<Part> parts;
    const Matrix &q, &k, &v, &out;
    const float* sinks;
    int64_t items;
    std::atomic<int64_t> next{0};
};

Prefill::Prefill(const std::vector<LayerShape>& layers, ActType type, std::shared_ptr<Workers> workers,
                 const std::string& isa)
    : table_(select_isa(isa)),
      kernel_(table_.prompts[static_cast<int>(type)]),
      type_(type),
      workers_(std::move(workers)),
      scratch_(workers_->threads()),
      clock_(workers_->threads()) {
    lay_out(layers, KvType::kF32, kTile);  // throws for shapes that make no sense
    size_t scratch = 64;
    for (const LayerShape& s : layers) {
        const int tokens = std::max(1, kPromptItemRows / s.group());
        const PromptLayout l = lay_out_prompts(s, kernel_);
        layers_.push_back({s, l, tokens, scratch_bytes(l, kernel_, int64_t{tokens} * s.group())});
        scratch = std::max(scratch, layers_.back().scratch);
    }
    for (auto& buffer : scratch_) {
        buffer.reset(static_cast<uint8_t*>(std::aligned_alloc(64, scratch)));
        if (!buffer) throw std::bad_alloc();
    }
}

const Prefill::Layer& Prefill::layer_at(int layer) const {
    check_layer(layer, layers_.size());
    return layers_[layer];
}

int64_t Prefill::packed_bytes(int layer, int64_t tokens) const {
    return (tokens + kPromptTile - 1) / kPromptTile * layer_at(layer).layout.tile_stride * 4;
}

void Prefill::check(const Layer& l, const std::vector<PromptChunk>& chunks, const Matrix& q, const Matrix& k,
                    const Matrix& v, const Matrix& out, const float* sinks, int64_t sink_count) const {
    int64_t tokens = 0;
    for (const PromptChunk& c : chunks) {
        if (c.start < 0 || c.count < 0) invalid("starts and counts: expected none below 0");
        if (c.skipped < 0 || c.skipped > c.count) invalid("skipped_queries: expected 0 to the count of every chunk");
        const int64_t need = round_up(c.start + c.count, kPromptTile) / kPromptTile * l.layout.tile_stride * 4;
        if (c.bytes < need) {
            invalid("packed: expected at least " + std::to_string(need) + " bytes for " +
                    std::to_string(c.start + c.count) + " tokens, got " + std::to_string(c.bytes));
        }
        tokens += c.count;
    }
    const auto expect = [&](const char* name, const Matrix& m, int64_t columns) {
        if (m.rows != tokens || m.columns != columns) {
            invalid(std::string(name) + ": expected shape [" + std::to_string(tokens) + ", " + std::to_string(columns) +
                    "], got [" + std::to_string(m.rows) + ", " + std::to_string(m.columns) + "]");
        }
        if (m.type != type_) invalid(std::string(name) + ": expected the dtype that prompts were opened with");
    };
    const LayerShape& s = l.shape;
    expect("q", q, int64_t{s.q_heads} * s.k_dim);
    expect("k", k, int64_t{s.kv_heads} * s.k_dim);
    expect("v", v, int64_t{s.kv_heads} * s.v_dim);
    expect("out", out, int64_t{s.q_heads} * s.v_dim);
    if (s.sinks != (sinks != nullptr) || (s.sinks && sink_count != s.q_heads)) {
        invalid("sinks: expected " + (s.sinks ? std::to_string(s.q_heads) + " values" : std::string("None")) +
                " for this layer, got " + (sinks ? std::to_string(sink_count) + " values" : std::string("None")));
    }
}

void Prefill::pack(const Call& call, int64_t item) const {
    const LayerShape& s = call.layer->shape;
    const Call::Part& part = call.parts[item / s.kv_heads];
    const int64_t head = item % s.kv_heads;
    PromptPackArgs a{};
    a.layout = &call.layer->layout;
    a.tiles = reinterpret_cast<uint32_t*>(part.chunk.packed) + head * a.layout->tile_words;
    a.k = at(call.k, part.first_row, head * s.k_dim);
    a.v = at(call.v, part.first_row, head * s.v_dim);
    a.type = type_;
    a.k_stride = call.k.stride;
    a.v_stride = call.v.stride;
    a.position = part.chunk.start;
    a.count = part.chunk.count;
    kernel_.pack(a);
}

// Goes head by head, so that keys stay in the cache, and backwards, so that the last item is short.
void Prefill::attend_item(const Call& call, int64_t item, int thread) const {
    const auto after = std::upper_bound(call.parts.begin(), call.parts.end(), item,
                                        [](int64_t x, const Call::Part& p) { return x < p.first_item; });
    const Call::Part& part = *(after - 1);
    const Layer& l = *call.layer;
    const LayerShape& s = l.shape;
    const int64_t i = item - part.first_item, head = i / part.items_per_head, q_head = head * s.group();
    const int64_t run = part.items_per_head - 1 - i % part.items_per_head,
                  token = part.chunk.skipped + run * l.tokens_per_item, row = part.first_row + token;
    PromptAttendArgs a{};
    a.layout = &l.layout;
    a.tiles = reinterpret_cast<const uint32_t*>(part.chunk.packed) + head * a.layout->tile_words;
    a.q = at(call.q, row, q_head * s.k_dim);
    a.type = type_;
    a.q_stride = call.q.stride;
    a.group = s.group();
    a.position = part.chunk.start + token;
    a.count = std::min<int64_t>(l.tokens_per_item, part.chunk.count - token);
    a.window = s.window;
    a.scale = s.scale;
    a.softcap = s.softcap;
    a.sinks = call.sinks ? call.sinks + q_head : nullptr;
    a.out = const_cast<uint8_t*>(at(call.out, row, q_head * s.v_dim));
    a.out_stride = call.out.stride;
    a.scratch = scratch_[thread].get();
    kernel_.attend(a);
}

void Prefill::attend(int layer, const std::vector<PromptChunk>& chunks, const Matrix& q, const Matrix& k,
                     const Matrix& v, const Matrix& out, const float* sinks, int64_t sink_count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const double start = seconds_now();
    const Layer& l = layer_at(layer);
    check(l, chunks, q, k, v, out, sinks, sink_count);
    Call call{this, &l, {}, q, k, v, out, sinks, 0};
    int64_t row = 0, items = 0;
    double products = 0;
    for (const PromptChunk& c : chunks) {
        const int64_t read = c.count - c.skipped, per_head = (read + l.tokens_per_item - 1) / l.tokens_per_item;
        call.parts.push_back({c, row, items, per_head});
        row += c.count;
        items += per_head * l.shape.kv_heads;
        products += double(read) * (c.start + c.count) * l.shape.q_heads * (l.shape.k_dim + l.shape.v_dim);
    }
    const auto run = [&](int64_t count, Workers::Work work) {
        call.items = count;
        call.next.store(0);
        products > kInlineProducts ? workers_->run(work, &call) : work(&call, 0);
    };
    run(static_cast<int64_t>(chunks.size()) * l.shape.kv_heads, [](void* context, int thread) {
        Call& c = *static_cast<Call*>(context);
        const double begun = seconds_now();
        for (int64_t i; (i = c.next.fetch_add(1)) < c.items;) c.prefill->pack(c, i);
        c.prefill->clock_.add(thread, seconds_now() - begun);
    });
    run(items, [](void* context, int thread) {
        Call& c = *static_cast<Call*>(context);
        const double begun = seconds_now();
        for (int64_t i; (i = c.next.fetch_add(1)) < c.items;) c.prefill->attend_item(c, i, thread);
        c.prefill->clock_.add(thread, seconds_now() - begun);
    });
    clock_.add_call(seconds_now() - start);
}

}  // namespace hpcdecode
