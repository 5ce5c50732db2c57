#include "prefill.h"

#include <algorithm>
#include <new>
#include <optional>
#include <stdexcept>

#include "isa.h"

namespace hpcdecode {
namespace {

constexpr double kNewest = 0.25;  // weight of a call in the mean

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
size_t scratch_bytes(const PromptLayout& l, const PromptKernel& kernel, int64_t rows, int bias_dim) {
    const int64_t padded = round_up(rows, kernel.rows), scores = int64_t{kernel.rows} * kPromptTile;
    const int64_t words[] = {padded * l.k_words, padded * l.v_pad, padded, padded * kTile,
                             padded * bias_dim,  2 * scores,       scores};
    int64_t bytes = 0;
    for (int64_t n : words) bytes += round_up(n * 4, 64);
    return static_cast<size_t>(bytes);
}

}  // namespace

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
        layers_.push_back({s, l, tokens, scratch_bytes(l, kernel_, int64_t{tokens} * s.group(), s.bias.dim)});
        scratch = std::max(scratch, layers_.back().scratch);
    }
    for (auto& buffer : scratch_) {
        buffer.reset(static_cast<uint8_t*>(std::aligned_alloc(64, scratch)));
        if (!buffer) throw std::bad_alloc();
        scratch_of_.push_back(buffer.get());
    }
}

const PromptLayer& Prefill::layer_at(int layer) const {
    check_layer(layer, layers_.size());
    return layers_[layer];
}

int64_t Prefill::packed_bytes(int layer, int64_t tokens) const {
    return (tokens + kPromptTile - 1) / kPromptTile * layer_at(layer).layout.tile_stride * 4;
}

void Prefill::check(const PromptLayer& l, const PromptRows& rows) const {
    int64_t tokens = 0;
    for (const PromptChunk& c : rows.chunks) {
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
    expect("q", rows.q, s.q_columns());
    expect("k", rows.k, int64_t{s.kv_heads} * s.k_dim);
    expect("v", rows.v, int64_t{s.kv_heads} * s.v_dim);
    expect("out", rows.out, int64_t{s.q_heads} * s.v_dim);
    if (s.sinks != (rows.sinks != nullptr) || (s.sinks && rows.sink_count != s.q_heads)) {
        invalid("sinks: expected " + (s.sinks ? std::to_string(s.q_heads) + " values" : std::string("None")) +
                " for this layer, got " +
                (rows.sinks ? std::to_string(rows.sink_count) + " values" : std::string("None")));
    }
}

RegionSeconds Prefill::attend(int layer, const PromptRows& rows, KvCache* cache, const LayerRows* beside) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const double start = seconds_now();
    const PromptLayer& l = layer_at(layer);
    check(l, rows);
    if (cache && cache->workers() != workers_) invalid("beside: expected the KV cache whose threads prompts use");
    std::optional<KvItems> kv;
    if (cache) kv.emplace(*cache, *beside);
    PromptItems prompts(l, kernel_, rows, threads(), seconds_per_product_);
    const bool parallel = worth_waking(prompts.products(), kv ? kv->bytes() : 0);
    item_times_.clear();
    const Region region{threads(), kv ? &*kv : nullptr, prompts, scratch_of_, clock_, traces_ ? &item_times_ : nullptr};
    const KindSeconds spent = run_region(region, parallel ? workers_.get() : nullptr);
    learn(prompts.products(), spent.of[kPrompt]);
    const double seconds = seconds_now() - start, share = spent.sum() > 0 ? seconds / spent.sum() : 0;
    clock_.add_call(seconds);
    if (kv) kv->finish(spent.of[kAttend] * share, spent.of[kAttend]);
    return {spent.of[kAttend] * share, spent.of[kAppend] * share, (spent.of[kPack] + spent.of[kPrompt]) * share};
}

void Prefill::learn(double products, double busy_seconds) {
    if (products > 0 && busy_seconds > 0)
        seconds_per_product_ += kNewest * (busy_seconds / products - seconds_per_product_);
}

}  // namespace hpcdecode
