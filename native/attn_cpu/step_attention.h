// A step's attention called from within other work, thread by thread.
#pragma once
#include <mutex>
#include <vector>

#include "engine.h"
#include "row_attention.h"

namespace hpcdecode {

// One new token of each of `slots`, which have been extended by it. Between `begin` and `end` the engine does nothing
// else; its threads are those that call.
class StepAttention : public RowAttention {
  public:
    // sinks: of every layer, empty where it has none.
    StepAttention(Engine& engine, std::vector<int32_t> slots, ActType type, std::vector<std::vector<float>> sinks);

    void begin(int64_t sequences, int threads) override;
    void attend(int layer, int thread, const SequenceRows& rows) override;
    int64_t foresee(int layer, const SequenceRows& rows, std::vector<Lines>& lines) const override;
    void end() override;

    double seconds() const { return seconds_; }  // that a thread spent on average

  private:
    struct Own {
        AttendPlan plan;
        std::vector<int32_t> slots;
        int64_t bytes = 0;
        double seconds = 0;
    };

    Engine& engine_;
    std::vector<int32_t> slots_, ones_;
    ActType type_;
    std::vector<std::vector<float>> sinks_;
    std::vector<Own> own_;  // one per thread
    std::unique_lock<std::mutex> lock_;
    double seconds_ = 0;
};

}  // namespace hpcdecode
