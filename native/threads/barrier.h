// A barrier for threads of which each has a core.
#pragma once
#include "futex.h"

namespace hpcdecode {

// Waits for a while at first, then sleeps: whoever yields its core to others' work may wait for long to get it back,
// and all members with it.
class Barrier {
  public:
    void wait(int members) {
        if (members == 1) return;
        const uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1);
            if (sleepers_.load() > 0) wake_all(phase_);
            return;
        }
        for (int turn = 0; turn < kSpins; ++turn, relax())
            if (phase_.load(std::memory_order_acquire) != phase) return;
        sleepers_.fetch_add(1);
        while (phase_.load() == phase) sleep_while(phase_, phase);
        sleepers_.fetch_sub(1);
    }

  private:
    static constexpr int kSpins = 4000;
    std::atomic<int> arrived_{0};
    std::atomic<uint32_t> phase_{0}, sleepers_{0};
};

}  // namespace hpcdecode
