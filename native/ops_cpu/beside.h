// Work beside that of products: memory that their tiles fetch, and what is done with it from panel to panel.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "row_attention.h"

namespace hpcdecode::ops {

class Beside {
  public:
    virtual ~Beside() = default;
    virtual Lines fetch(int64_t bytes) = 0;  // what comes next, at most so much of it
    virtual void work() = 0;                 // between two panels
};

// The attention of a block's sequences at one layer, some sequences at a time, after their keys and values were
// fetched.
class AttentionBeside : public Beside {
  public:
    AttentionBeside(RowAttention& attention, int thread) : attention_(attention), thread_(thread) {}

    void start(int layer, const SequenceRows& rows);
    Lines fetch(int64_t bytes) override;
    void work() override;
    void finish();  // the sequences that are left

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
