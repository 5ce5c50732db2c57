// What a decode step does at all layers at which a model is cut, some of which attend and some of which keep states.
#pragma once
#include <vector>

#include "step_attention.h"
#include "step_states.h"

namespace hpcdecode {

// A layer is one of those that attend, or one of those that keep states.
struct StepLayer {
    bool attends;
    int place;  // among those of its kind
};

class StepLayers : public RowAttention {
  public:
    // attention, states: Of the same slots; either may be null if no layer is of its kind. They must live as long.
    // Throws std::invalid_argument.
    StepLayers(StepAttention* attention, StepStates* states, std::vector<StepLayer> layers);

    void begin(int64_t sequences, int threads) override;
    void attend(int layer, int thread, const SequenceRows& rows) override;
    int64_t foresee(int layer, const SequenceRows& rows, std::vector<Lines>& lines) const override;
    void end() override;

    double seconds() const;  // that a thread spent on average

  private:
    RowAttention& of(const StepLayer& layer) const;

    StepAttention* attention_;
    StepStates* states_;
    std::vector<StepLayer> layers_;
};

}  // namespace hpcdecode
