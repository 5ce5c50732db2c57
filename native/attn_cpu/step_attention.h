// The attention of a decode step as a stage of a chain, whose threads call it.
#pragma once
#include <mutex>
#include <vector>

#include "kv_cache.h"
#include "row_attention.h"

namespace hpcdecode {

// Attention of the last counts[i] tokens of slots[i], which have been extended by as many. Between `begin` and `end`
// the KV cache is locked, and the calling threads do its work.
class StepAttention : public RowAttention {
  public:
    // sinks: Those of every layer, empty for a layer without.
    StepAttention(KvCache& cache, std::vector<int32_t> slots, std::vector<int32_t> counts, ActType type,
                  std::vector<std::vector<float>> sinks);

    int64_t sequences(int64_t) const override { return static_cast<int64_t>(slots_.size()); }
    void begin(int64_t tokens, int threads) override;
    void attend(int layer, int thread, const SequenceRows& rows) override;
    int64_t foresee(int layer, const SequenceRows& rows, std::vector<Lines>& lines) const override;
    void end() override;
    void cancel();  // ends a step that did not begin elsewhere

    double seconds() const { return seconds_; }  // that a thread spent on average

  private:
    struct Own {
        AttendPlan plan;
        std::vector<int32_t> slots, counts;
        std::vector<float> scores;  // of indexers
        int64_t bytes = 0;
        double seconds = 0;
    };

    bool several() const { return tokens_ > sequences(tokens_); }  // tokens of any sequence

    KvCache& cache_;
    std::vector<int32_t> slots_, counts_;
    std::vector<int64_t> firsts_;  // first row of each sequence
    int64_t tokens_ = 0;
    ActType type_;
    std::vector<std::vector<float>> sinks_;
    std::vector<Own> own_;  // one per thread
    std::unique_lock<std::mutex> lock_;
    double seconds_ = 0;
};

}  // namespace hpcdecode
