// Work that a GEMM takes along: its tiles prefetch memory, which is used between panels.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "row_attention.h"

namespace hpcdecode::ops {

class Beside {
  public:
    virtual ~Beside() = default;
    virtual Lines fetch(int64_t bytes) = 0;  // the next memory to prefetch, at most so much
    virtual void work() = 0;                 // between two panels
};

// The attention of a block's sequences at one layer, some sequences at a time, once their keys and values were
// prefetched.
class AttentionBeside : public Beside {
  public:
    AttentionBeside(RowAttention& attention, int thread) : attention_(attention), thread_(thread) {}

    void start(int layer, const SequenceRows& rows);
    Lines fetch(int64_t bytes) override;
    void work() override;
    void finish();  // attends to the sequences that are left

  private:
    void foresee();

    RowAttention& attention_;
    int thread_, layer_ = 0;
    SequenceRows left_{};
    int64_t foreseen_ = 0;  // sequences
    std::vector<Lines> lines_;
    size_t fetched_ = 0;  // of lines_
};

}  // namespace hpcdecode::ops
