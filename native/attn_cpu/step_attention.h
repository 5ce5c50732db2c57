// The attention of a decode step as a stage of a chain, whose threads call it.
#pragma once
#include <mutex>
#include <vector>

#include "kv_cache.h"
#include "row_attention.h"

namespace hpcdecode {

// Attention of one new token of each of `slots`, which have been extended by one token. Between `begin` and `end` the
// KV cache is locked, and the calling threads do its work.
class StepAttention : public RowAttention {
  public:
    // sinks: Those of every layer, empty for a layer without.
    StepAttention(KvCache& cache, std::vector<int32_t> slots, ActType type, std::vector<std::vector<float>> sinks);

    void begin(int64_t sequences, int threads) override;
    void attend(int layer, int thread, const SequenceRows& rows) override;
    int64_t foresee(int layer, const SequenceRows& rows, std::vector<Lines>& lines) const override;
    void end() override;
    void cancel();  // ends a step that did not begin elsewhere

    double seconds() const { return seconds_; }  // that a thread spent on average

  private:
    struct Own {
        AttendPlan plan;
        std::vector<int32_t> slots;
        std::vector<float> scores;  // of indexers
        int64_t bytes = 0;
        double seconds = 0;
    };

    KvCache& cache_;
    std::vector<int32_t> slots_, ones_;
    ActType type_;
    std::vector<std::vector<float>> sinks_;
    std::vector<Own> own_;  // one per thread
    std::unique_lock<std::mutex> lock_;
    double seconds_ = 0;
};

}  // namespace hpcdecode
