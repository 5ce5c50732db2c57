#include "step_states.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>

namespace hpcdecode {
namespace {
constexpr int64_t kForeseenBytes = 512 << 10;  // prefetched at once: what a core's cache can keep
}  // namespace

StepStates::StepStates(StateStore& store, std::vector<int32_t> slots)
    : store_(store), slots_(std::move(slots)), ones_(slots_.size(), 1) {}

void StepStates::begin(int64_t sequences, int threads) {
    std::unique_lock<std::mutex> lock(store_.mutex_);
    const int n = static_cast<int>(slots_.size());
    if (sequences != n)
        throw std::invalid_argument("slots: expected " + std::to_string(sequences) + ", got " + std::to_string(n));
    if (threads > store_.threads()) {
        throw std::invalid_argument("threads: expected " + std::to_string(store_.threads()) + " at most, got " +
                                    std::to_string(threads));
    }
    size_t need = 0;
    for (size_t i = 0; i < store_.layers_.size(); ++i) {
        const RecurrentLayer& l = store_.layers_[i];
        store_.slots_.check_run(static_cast<int>(i), slots_.data(), ones_.data(), n);
        need = std::max(need, store_.scratch_of(l, l.shape.heads, 1 + store_.slots_.lookahead()).end);
    }
    store_.grow_scratch(need);
    own_seconds_.assign(threads, 0.0);
    lock_ = std::move(lock);
}

SequenceRun StepStates::one_token(int slot, int layer, int64_t row) const {
    return {slot, 0, 1, row, store_.slots_.held(slot, layer, 1)};
}

void StepStates::attend(int layer, int thread, const SequenceRows& rows) {
    const auto start = std::chrono::steady_clock::now();
    const RecurrentLayer& l = store_.layers_[layer];
    const ActType type = store_.type_;
    const int64_t size = type == ActType::kF32 ? 4 : 2;
    const Matrix in{const_cast<uint8_t*>(rows.qkv), type, rows.count, l.shape.row_columns(type), rows.qkv_bytes / size};
    const Matrix out{rows.out, type, rows.count, l.shape.out_columns(), rows.out_bytes / size};
    const StateStore::Call call{&store_, &l, &in, &out, nullptr};
    for (int64_t i = 0; i < rows.count; ++i) {
        const SequenceRun run = one_token(slots_[rows.first + i * rows.step], layer, i);
        store_.run_heads(call, {&run, 0, l.shape.heads}, thread);
    }
    own_seconds_[thread] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int64_t StepStates::foresee(int layer, const SequenceRows& rows, std::vector<Lines>& lines) const {
    const RecurrentLayer& l = store_.layers_[layer];
    int64_t bytes = 0, count = 0;
    for (; count < rows.count && bytes < kForeseenBytes; ++count) {
        const char* place = reinterpret_cast<const char*>(store_.place_of(slots_[rows.first + count * rows.step]));
        const int64_t state = std::min<int64_t>(l.state_bytes, kForeseenBytes - bytes);
        lines.push_back({place + l.window, place + l.window + l.window_bytes});
        lines.push_back({place + l.state, place + l.state + state});
        bytes += state + static_cast<int64_t>(l.window_bytes);
    }
    return count;
}

void StepStates::end() {
    for (size_t i = 0; i < store_.layers_.size(); ++i) {
        for (int slot : slots_) store_.count_bytes(store_.layers_[i], one_token(slot, static_cast<int>(i), 0));
        store_.slots_.count_run(static_cast<int>(i), slots_.data(), ones_.data(), static_cast<int>(slots_.size()));
    }
    seconds_ =
        std::accumulate(own_seconds_.begin(), own_seconds_.end(), 0.0) / static_cast<double>(own_seconds_.size());
    store_.run_seconds_ += seconds_;
    lock_.unlock();
}

}  // namespace hpcdecode
