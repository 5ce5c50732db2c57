#include "step_attention.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "call.h"

namespace hpcdecode {
namespace {
constexpr int64_t kForeseenBytes = 512 << 10;  // prefetched at once: what a core's cache can keep
}  // namespace

StepAttention::StepAttention(KvCache& cache, std::vector<int32_t> slots, std::vector<int32_t> counts, ActType type,
                             std::vector<std::vector<float>> sinks)
    : cache_(cache), slots_(std::move(slots)), counts_(std::move(counts)), type_(type), sinks_(std::move(sinks)) {
    const auto& layers = cache_.pool_.layers();
    if (counts_.size() != slots_.size() || std::any_of(counts_.begin(), counts_.end(), [](int n) { return n < 1; }))
        throw std::invalid_argument("counts: expected one of at least 1 for each slot");
    for (const int32_t count : counts_) {
        firsts_.push_back(tokens_);
        tokens_ += count;
    }
    const auto chooses = [](const LayerLayout& l) { return l.shape.chooses(); };
    if (several() && std::any_of(layers.begin(), layers.end(), chooses))
        throw std::invalid_argument("counts: expected 1 where layers choose tokens");
    if (sinks_.size() != layers.size()) {
        throw std::invalid_argument("sinks: expected those of " + std::to_string(layers.size()) + " layers, got " +
                                    std::to_string(sinks_.size()));
    }
    for (size_t i = 0; i < layers.size(); ++i)
        check_sinks(layers[i].shape, sinks_[i].empty() ? nullptr : sinks_[i].data(),
                    static_cast<int64_t>(sinks_[i].size()));
}

void StepAttention::begin(int64_t tokens, int threads) {
    std::unique_lock<std::mutex> lock(cache_.mutex_);
    if (tokens != tokens_) {
        throw std::invalid_argument("slots: expected those of " + std::to_string(tokens) + " tokens, got " +
                                    std::to_string(tokens_));
    }
    if (threads > cache_.threads()) {
        throw std::invalid_argument("threads: expected " + std::to_string(cache_.threads()) + " at most, got " +
                                    std::to_string(threads));
    }
    cache_.pool_.check_written(slots_.data(), counts_.data(), static_cast<int>(slots_.size()));
    const int64_t most = counts_.empty() ? 1 : *std::max_element(counts_.begin(), counts_.end());
    for (const LayerLayout& l : cache_.pool_.layers())
        cache_.reserve_scratch(l, std::min<int64_t>(most * l.shape.group(), kMaxRowBlock) * l.shape.kv_heads);
    own_.resize(threads);
    lock_ = std::move(lock);
}

void StepAttention::attend(int layer, int thread, const SequenceRows& rows) {
    const auto start = std::chrono::steady_clock::now();
    Own& own = own_[thread];
    own.slots.clear();
    own.counts.clear();
    for (int64_t i = 0; i < rows.count; ++i) {
        own.slots.push_back(slots_[rows.first + i * rows.step]);
        own.counts.push_back(counts_[rows.first + i * rows.step]);
    }
    const LayerLayout& l = cache_.pool_.layers()[layer];
    const int64_t size = type_ == ActType::kF32 ? 4 : 2;
    const int64_t height = several() ? tokens_ : rows.count;
    const Matrix qkv{const_cast<uint8_t*>(rows.qkv), type_, height, l.shape.row_columns(), rows.qkv_bytes / size};
    const Matrix out{rows.out, type_, height, l.shape.out_columns(), rows.out_bytes / size};
    own.plan.make(cache_.pool_, layer, own.slots.data(), own.counts.data(), static_cast<int>(rows.count), 1);
    for (int64_t i = 0; several() && i < rows.count; ++i)  // one thread keeps their order
        own.plan.sequences[i].first_token = firsts_[rows.first + i * rows.step];
    const float* sinks = sinks_[layer].empty() ? nullptr : sinks_[layer].data();
    KvCache::Call call{&cache_, layer, &l, &qkv, &out, l.shape.q_columns(), sinks, &own.plan, nullptr};
    for (const SequencePlan& s : own.plan.sequences)
        for (int head = 0; (s.write_first || l.shape.chooses()) && head < l.shape.kv_heads; ++head)
            cache_.write_rows(call, s, head);
    if (l.shape.chooses()) {
        const int n = static_cast<int>(rows.count);
        cache_.begin_choices(l, own.slots.data(), own.counts.data(), n);
        const std::vector<Query> queries = queries_of(cache_.pool_, own.slots.data(), own.counts.data(), n);
        cache_.choose_here(call, queries, thread, own.scores);
        own.plan.make_chosen(cache_.pool_, layer, queries, cache_.choices_, 1);
    }
    for (int64_t item = 0; item < own.plan.items; ++item) cache_.run_item(call, item, thread);
    own.bytes += own.plan.bytes;
    own.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int64_t StepAttention::foresee(int layer, const SequenceRows& rows, std::vector<Lines>& lines) const {
    const LayerLayout& l = cache_.pool_.layers()[layer];
    int64_t bytes = 0, count = 0;
    for (; count < rows.count && bytes < kForeseenBytes; ++count) {
        const int32_t slot = slots_[rows.first + count * rows.step];
        const HeadView view = cache_.pool_.view(layer, 0, slot);
        const int64_t tokens = view.layout->block_tokens, length = cache_.pool_.length(slot);
        if (l.shape.chooses()) continue;  // which tokens is not known yet
        int64_t block = l.shape.window.first(length) / tokens;
        for (; block * tokens < length && bytes < kForeseenBytes; ++block) {
            const char* at = reinterpret_cast<const char*>(view.base) + view.blocks[block] * view.block_bytes;
            lines.push_back({at, at + l.block_bytes});
            bytes += static_cast<int64_t>(l.block_bytes);
        }
    }
    return count;
}

void StepAttention::cancel() {
    own_.clear();
    lock_.unlock();
}

void StepAttention::end() {
    double seconds = 0;
    for (Own& own : own_) {
        cache_.bytes_read_ += own.bytes;
        seconds += own.seconds;
    }
    seconds_ = seconds / static_cast<double>(own_.size());
    cache_.attend_seconds_ += seconds_;
    cancel();
}

}  // namespace hpcdecode
