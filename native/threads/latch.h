// A latch that opens once a number of things are done.
#pragma once
#include "futex.h"

namespace hpcdecode {

// Waits for a while at first, then sleeps, as a Barrier does.
class Latch {
  public:
    // Before any thread uses it.
    void expect(uint32_t count) { left_.store(count); }

    bool open() const { return left_.load(std::memory_order_acquire) == 0; }

    void count_down() {
        if (left_.fetch_sub(1) == 1 && sleepers_.load() > 0) wake_all(left_);
    }

    void wait() {
        for (int turn = 0; turn < kSpins; ++turn, relax())
            if (open()) return;
        sleepers_.fetch_add(1);
        while (const uint32_t left = left_.load()) sleep_while(left_, left);
        sleepers_.fetch_sub(1);
    }

  private:
    static constexpr int kSpins = 4000;
    std::atomic<uint32_t> left_{0}, sleepers_{0};
};

}  // namespace hpcdecode
