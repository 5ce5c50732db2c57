// The recurrent layers of a decode step as stages of a chain, whose threads call them.
#pragma once
#include <mutex>
#include <vector>

#include "row_attention.h"
#include "state_store.h"

namespace hpcdecode {

// Takes one new token of each of `slots`, which have been extended by one token, through the states of all layers.
// Between `begin` and `end` the store is locked, and the calling threads do its work.
class StepStates : public RowAttention {
  public:
    StepStates(StateStore& store, std::vector<int32_t> slots);

    void begin(int64_t sequences, int threads) override;
    void attend(int layer, int thread, const SequenceRows& rows) override;
    int64_t foresee(int layer, const SequenceRows& rows, std::vector<Lines>& lines) const override;
    void end() override;

    double seconds() const { return seconds_; }  // that a thread spent on average

  private:
    SequenceRun one_token(int slot, int layer, int64_t row) const;

    StateStore& store_;
    std::vector<int32_t> slots_, ones_;
    std::vector<double> own_seconds_;  // one per thread
    std::unique_lock<std::mutex> lock_;
    double seconds_ = 0;
};

}  // namespace hpcdecode
